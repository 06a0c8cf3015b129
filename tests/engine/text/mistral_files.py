"""Small tokenizer files in Mistral's own formats."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest

_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] "
    "[ARGS] [CALL_ID] [THINK] [/THINK] [MODEL_SETTINGS] [/MODEL_SETTINGS]"
).split()
_MERGES = (b"th", b"the", b" th", b" the", b"an", b"in", b"re", "ö".encode(), "€".encode()[:2], "€".encode(), b" w")
_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NUM_SPECIAL = 32
VOCAB_SIZE = NUM_SPECIAL + 256 + len(_MERGES)


def tekken(folder: Path, version: str = "v7") -> Path:
    """Writes a tekken.json of 256 bytes and some merges, and returns its folder."""
    texts = [bytes([i]) for i in range(256)] + list(_MERGES)
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(text).decode(), "token_str": None} for i, text in enumerate(texts)
    ]
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(_SPECIAL)]
    config = {
        "pattern": _PATTERN,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": VOCAB_SIZE,
        "default_num_special_tokens": NUM_SPECIAL,
        "version": version,
    }
    content = {"config": config, "vocab": vocab, "special_tokens": special, "version": 1, "type": "Tekken"}
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


def sentencepiece_v1() -> Path:
    """The tokenizer.model of Mistral's first models, which mistral-common has with it."""
    return _data() / "tokenizer.model.v1"


def sentencepiece_v3(folder: Path) -> Path:
    """Copies the tokenizer.model.v3 that mistral-common has with it, and returns its folder."""
    shutil.copy(_data() / "mistral_instruct_tokenizer_240323.model.v3", folder / "tokenizer.model.v3")
    return folder


def _data() -> Path:
    return Path(pytest.importorskip("mistral_common").__file__).parent / "data"
