"""Tokenizers of `tiktoken.model`, as Kimi's models have it: tokens and their ranks, by the tokenizers library.

The file does not say how a text is cut into words, nor which tokens are special. Code beside it does, but is not run.
Instead, models with known modules are read: these agree in both.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from ..errors import ModelError
from ..files.reading import MAX_TOKENIZER_BYTES, is_there, read_file
from .added_tokens import add_ends, add_tokens, listed_tokens
from .piece_merges import pairs_of
from .sentencepiece_model import MAX_CHARACTERS, MAX_PIECE_CHARACTERS, MAX_PIECES
from .splitting import SPLITTINGS
from .tokenizer_backends import CHARACTER_OF_BYTE, TokenizersBackend, reading_tokenizer

TIKTOKEN_MODEL = "tiktoken.model"
_MODULES = ("tokenization_kimi", "tokenization_moonshot")
_NUM_SPECIAL = 256


def load_tiktoken(folder: Path, config: Mapping[str, Any]) -> TokenizersBackend | None:
    """The tokenizer of a folder's ranks. None if there are none, or its code is not known.

    Raises ModelError for files that are broken, or do not fit each other.
    """
    path = folder / TIKTOKEN_MODEL
    if not is_there(path) or _module(config) not in _MODULES:
        return None
    tokens = _tokens(path)
    added = listed_tokens(folder, config)
    reserved = (f"<|reserved_token_{i}|>" for i in range(len(tokens), len(tokens) + _NUM_SPECIAL))
    special = [added[i].content if i in added else name for i, name in enumerate(reserved, len(tokens))]
    with reading_tokenizer(path):
        ids = {token: i for i, token in enumerate(tokens)}
        merges = [pair for token in tokens for pair in pairs_of(token, ids)]
        # A word that is a token is taken whole, as tiktoken takes it.
        made = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=True))
        made.pre_tokenizer = SPLITTINGS["kimi-k2"].pre_tokenizer()
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        add_tokens(made, folder, config)
        add_ends(made, folder, config)
        return TokenizersBackend(made)


def _module(config: Mapping[str, Any]) -> str | None:
    """The module of the tokenizer's code, as in `{"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]}`."""
    classes = config.get("auto_map")
    named = classes.get("AutoTokenizer") if isinstance(classes, dict) else classes
    named = next(iter(named), None) if isinstance(named, list) else named
    return named.rpartition("--")[2].partition(".")[0] if isinstance(named, str) else None


def _tokens(path: Path) -> list[str]:
    """The tokens by rank, with a character for each byte."""
    tokens: list[str] = []
    try:
        for line in read_file(path, MAX_TOKENIZER_BYTES).split(b"\n"):
            if line:
                token, _, rank = line.rstrip(b"\r").partition(b" ")
                if int(rank) != len(tokens) or len(tokens) == MAX_PIECES:
                    raise ValueError
                tokens.append(base64.b64decode(token, validate=True).decode("latin-1").translate(CHARACTER_OF_BYTE))
    except ValueError as error:
        raise ModelError(
            f"{path} must have lines of a token in base64, a space and its rank, which is the number of tokens before "
            f"it, below {MAX_PIECES}"
        ) from error
    if len({*tokens}) < len(tokens) or not {*CHARACTER_OF_BYTE.values()}.issubset(tokens):
        raise ModelError(f"{path} must have each token once, and a token for each byte")
    if max(map(len, tokens)) > MAX_PIECE_CHARACTERS or sum(map(len, tokens)) > MAX_CHARACTERS:
        raise ModelError(f"{path} may have {MAX_PIECE_CHARACTERS} bytes a token, and {MAX_CHARACTERS} together")
    return tokens
