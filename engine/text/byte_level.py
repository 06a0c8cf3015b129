"""Tokenizers of `vocab.json` and `merges.txt`, as GPT-2 and OPT have them, made by the tokenizers library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from ..errors import ModelError
from ..files.folder import read_json, read_json_if_there
from ..files.reading import MAX_TOKENIZER_BYTES, is_there, read_file
from ..files.wording import shown
from .tokenizer_backends import TokenizersBackend, reading_tokenizer

VOCABULARY, MERGES = "vocab.json", "merges.txt"
_ADDED = "added_tokens.json"
# Classes of transformers that split texts as GPT-2's does, and write no token around a text unless the config asks.
_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast", "CodeGenTokenizer", "CodeGenTokenizerFast")
_END_OF_TEXT = "<|endoftext|>"  # what these classes take for special tokens that no file names
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPACE = "\u0120"  # how such a vocabulary writes a space


def load_byte_level(folder: Path, config: Mapping[str, Any]) -> TokenizersBackend | None:
    """The tokenizer of a folder's vocabulary and merges. None if it is of a class that splits texts otherwise.

    Raises ModelError for files that are broken, or do not fit each other.
    """
    if not is_there(folder / VOCABULARY) or not is_there(folder / MERGES):
        return None
    vocabulary = _vocabulary(folder / VOCABULARY)
    # Of a folder without the class only the vocabulary tells.
    class_name = config.get("tokenizer_class")
    if class_name not in _CLASSES and (class_name is not None or not any(t.startswith(_SPACE) for t in vocabulary)):
        return None
    with reading_tokenizer(folder / MERGES):
        made = tokenizers.Tokenizer(models.BPE(vocabulary, _merges(folder / MERGES)))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.get("add_prefix_space") is True)
        made.decoder = decoders.ByteLevel()
        _add_tokens(made, folder, config, vocabulary)
        bos = _token(_described(folder, config).get("bos_token", _END_OF_TEXT))
        if config.get("add_bos_token") is True and bos is not None and made.token_to_id(bos.content) is not None:
            made.post_processor = processors.TemplateProcessing(
                single=[bos.content, "$A"], special_tokens=[(bos.content, made.token_to_id(bos.content))]
            )
        backend = TokenizersBackend(made)
        backend.decode(backend.encode("a", add_special_tokens=True), skip_special_tokens=False)
        return backend


def _vocabulary(path: Path) -> dict[str, int]:
    """The tokens' ids, of which each is one token's. Raises ModelError."""
    vocabulary = read_json(path)
    ids = vocabulary.values()
    if not all(type(i) is int and 0 <= i < len(vocabulary) for i in ids) or len(set(ids)) != len(vocabulary):
        raise ModelError(f"{path} must give each token an id of its own, from 0 to their number")
    return vocabulary


def _merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    for line in read_file(path, MAX_TOKENIZER_BYTES).decode().split("\n"):
        if not line.strip() or line.startswith("#version"):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        merges.append((left, right))
    return merges


def _add_tokens(
    made: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], vocabulary: Mapping[str, int]
) -> None:
    """Tokens that a text is searched for: those with ids, in the order of these, and special ones."""
    by_id: dict[int, AddedToken] = {}
    listed = config.get("added_tokens_decoder")
    for number, value in listed.items() if isinstance(listed, dict) else ():
        if str(number).isdecimal() and (token := _token(value)) is not None:
            by_id[int(number)] = token
    for text, number in read_json_if_there(folder / _ADDED).items():
        if type(number) is int and text:
            by_id.setdefault(number, AddedToken(text, normalized=False, special=False))
    special = _described(folder, config)
    names = [special.get(name, _END_OF_TEXT if name in _SPECIAL[:3] else None) for name in _SPECIAL]
    further = special.get("additional_special_tokens")
    tokens = [_token(value) for value in [*names, *(further if isinstance(further, list) else ())]]
    # Nothing is added that no file has: the names of a class are its guess.
    known = {*vocabulary, *(token.content for token in by_id.values())}
    named = {*map(_text, special.values()), *map(_text, further if isinstance(further, list) else ())}
    _add(made, (token for _, token in sorted(by_id.items())))
    for number, token in by_id.items():
        if made.token_to_id(token.content) != number:
            raise ModelError(f"{folder}: the added token {shown(token.content)} cannot have the id {number}")
    _add(made, (token for token in tokens if token is not None and (token.content in known or token.content in named)))


def _add(made: tokenizers.Tokenizer, tokens: Iterable[AddedToken]) -> None:
    for token in tokens:
        (made.add_special_tokens if token.special else made.add_tokens)([token])


def _described(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_json_if_there(folder / "special_tokens_map.json"), **config}


def _token(value: object) -> AddedToken | None:
    """A special token, as a config writes it: a text, or an object with one and how it is found."""
    text = _text(value)
    if not text:
        return None
    fields = value if isinstance(value, dict) else {}
    flags = {name: fields.get(name) is True for name in ("lstrip", "rstrip", "single_word", "normalized")}
    return AddedToken(text, special=fields.get("special") is not False, **flags)


def _text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
