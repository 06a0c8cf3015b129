"""LateInteraction: how a ColBERT model marks, pads and skips the tokens of queries and documents.

The model: https://arxiv.org/abs/2004.12832. Its files are those of Stanford's ColBERT, or of PyLate.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..errors import ModelError
from ..files.folder import read_json_if_there
from ..files.wording import shown

_MOST_TOKENS = 10**6


class LateInteraction(Struct, frozen=True):
    """A query's tokens have `query_prefix` behind the first one, a document's `document_prefix`; empty: neither.

    A query of less than `query_length` tokens is filled up with masks, if it `expands`. Only if it `attends` to them,
    other tokens see masks. Documents have at most `document_length` tokens; those that are in the `skiplist` get no
    vector.
    """

    query_prefix: str
    document_prefix: str
    query_length: int
    document_length: int
    expands: bool = True
    attends: bool = False
    skiplist: tuple[str, ...] = tuple(string.punctuation)


def stanford(folder: Path) -> LateInteraction:
    """Of a checkpoint of Stanford's ColBERT, whose `artifact.metadata` may be missing. Raises ModelError."""
    path = folder / "artifact.metadata"
    metadata = read_json_if_there(path)
    if (similarity := metadata.get("similarity", "cosine")) != "cosine":
        raise ModelError(f"{path}: similarity is {shown(similarity)}; only cosine is supported")
    punctuation = _flag(path, metadata, "mask_punctuation", default=True)
    return LateInteraction(
        _text(path, metadata, "query_token_id", "[unused0]"),
        _text(path, metadata, "doc_token_id", "[unused1]"),
        _tokens(path, metadata, "query_maxlen", 32),
        _tokens(path, metadata, "doc_maxlen", 220),
        attends=_flag(path, metadata, "attend_to_mask_tokens", default=False),
        skiplist=tuple(string.punctuation) if punctuation else (),
    )


def pylate(path: Path, settings: Mapping[str, Any]) -> LateInteraction:
    """Of `settings`, the content of PyLate's `config_sentence_transformers.json` at `path`. Raises ModelError."""
    words = settings.get("skiplist_words")
    words = list(string.punctuation) if words is None else words
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ModelError(f"{path}: skiplist_words must be a list of texts")
    expands = _flag(path, settings, "do_query_expansion", default=True)
    return LateInteraction(
        _text(path, settings, "query_prefix", "[Q] "),
        _text(path, settings, "document_prefix", "[D] "),
        _tokens(path, settings, "query_length", 32),
        _tokens(path, settings, "document_length", 180),
        expands=expands,
        attends=expands and _flag(path, settings, "attend_to_expansion_tokens", default=False),
        skiplist=tuple(words),
    )


def _text(path: Path, values: Mapping[str, Any], name: str, default: str) -> str:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{path}: {name} must be a text, got {shown(value)}")
    return default if value is None else value


def _flag(path: Path, values: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{path}: {name} must be true or false, got {shown(value)}")
    return default if value is None else value


def _tokens(path: Path, values: Mapping[str, Any], name: str, default: int) -> int:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 4 <= value <= _MOST_TOKENS:
        raise ModelError(f"{path}: {name} must be a number of tokens from 4 to {_MOST_TOKENS}, got {shown(value)}")
    return value
