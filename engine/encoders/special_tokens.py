"""The special tokens that a model folder names: its mask, its padding, and so on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..files.folder import read_json_if_there


def special_tokens(folder: Path) -> Mapping[str, str]:
    """The texts of the tokens by their roles: `mask_token`, `pad_token`, ... Raises ModelError for a broken file."""
    named = {
        **read_json_if_there(folder / "special_tokens_map.json"),
        **read_json_if_there(folder / "tokenizer_config.json"),
    }
    tokens = {}
    for role, token in named.items():
        text = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(text, str):
            tokens[role] = text
    return tokens
