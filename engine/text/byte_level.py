"""Tokenizers of `vocab.json` and `merges.txt`, as GPT-2, Qwen2 and RoBERTa have them, by the tokenizers library."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ..errors import ModelError
from ..files.folder import read_json
from ..files.reading import MAX_TOKENIZER_BYTES, is_there, read_file
from .added_tokens import add_tokens, put_around, special_tokens, text_of
from .tokenizer_backends import TokenizersBackend, reading_tokenizer

VOCABULARY, MERGES = "vocab.json", "merges.txt"
_ENDS = ("bos", "eos")
_SPACE = "\u0120"  # how such a vocabulary writes a space
# A word with the mark before it, one digit, or a run of other marks; spaces go with what follows them.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Class(NamedTuple):
    """What a class of transformers does with texts, and its special tokens where no file names them."""

    names: Mapping[str, str]
    words: str | None = None  # the expression that cuts texts into words, in place of GPT-2's
    nfc: bool = False
    frames: bool = False  # whether a text is between cls_token and sep_token


_GPT2 = _Class(dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"))
_QWEN2 = _Class(dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"), _QWEN2_WORDS, nfc=True)
_ROBERTA = _Class(
    {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "cls_token": "<s>",
        "mask_token": "<mask>",
    },
    frames=True,
)
_CLASSES = {
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "Qwen2Tokenizer": _QWEN2,
    "RobertaTokenizer": _ROBERTA,
    "BartTokenizer": _ROBERTA,
    "LongformerTokenizer": _ROBERTA,
    "LEDTokenizer": _ROBERTA,
}


def load_byte_level(folder: Path, config: Mapping[str, Any], class_name: str | None) -> TokenizersBackend | None:
    """The tokenizer of a folder's vocabulary and merges. None if it is of a class that splits texts otherwise.

    Raises ModelError for files that are broken, or do not fit each other.
    """
    if not is_there(folder / VOCABULARY) or not is_there(folder / MERGES):
        return None
    vocabulary = _vocabulary(folder / VOCABULARY)
    # Of a folder without the class only the vocabulary tells.
    of_class = _CLASSES.get(class_name) if class_name else _GPT2
    if of_class is None or not (class_name or any(token.startswith(_SPACE) for token in vocabulary)):
        return None
    with reading_tokenizer(folder / MERGES):
        made = tokenizers.Tokenizer(models.BPE(vocabulary, _merges(folder / MERGES)))
        bytes_of = functools.partial(pre_tokenizers.ByteLevel, add_prefix_space=config.get("add_prefix_space") is True)
        if of_class.words is None:
            made.pre_tokenizer = bytes_of()
        else:
            words = pre_tokenizers.Split(tokenizers.Regex(of_class.words), "isolated")
            made.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of(use_regex=False)])
        if of_class.nfc:
            made.normalizer = normalizers.NFC()
        made.decoder = decoders.ByteLevel()
        add_tokens(made, folder, config, of_class.names)
        named = {**of_class.names, **special_tokens(folder, config)}
        if of_class.frames:
            put_around(made, text_of(named["cls_token"]), text_of(named["sep_token"]))
        else:
            around = (
                text_of(named.get(f"{end}_token")) if config.get(f"add_{end}_token") is True else None for end in _ENDS
            )
            put_around(made, *around)
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
