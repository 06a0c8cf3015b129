"""Tokenizers of `vocab.json` and `merges.txt`, as GPT-2, Qwen2 and RoBERTa have them, by the tokenizers library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ..errors import ModelError
from ..files.folder import read_json
from ..files.reading import MAX_TOKENIZER_BYTES, is_there, read_file
from .added_tokens import add_ends, add_tokens, put_around, special_tokens, text_of
from .splitting import SPLITTINGS, Splitting
from .tokenizer_backends import TokenizersBackend, reading_tokenizer

VOCABULARY, MERGES = "vocab.json", "merges.txt"
_SPACE = "\u0120"  # how such a vocabulary writes a space


class _Class(NamedTuple):
    """How a class of transformers treats texts, and its special tokens if no file names them."""

    names: Mapping[str, str]
    splitting: Splitting | None = None  # in place of GPT-2's
    frames: bool = False  # whether a text is between cls_token and sep_token


_GPT2 = _Class(dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"))
_QWEN2 = _Class(dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"), SPLITTINGS["qwen2"])
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
        begins = config.get("add_prefix_space") is True
        if of_class.splitting is None:
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=begins)
        else:
            made.pre_tokenizer = of_class.splitting.pre_tokenizer(begins)
            if of_class.splitting.nfc:
                made.normalizer = normalizers.NFC()
        made.decoder = decoders.ByteLevel()
        add_tokens(made, folder, config, of_class.names)
        if of_class.frames:
            named = {**of_class.names, **special_tokens(folder, config)}
            put_around(made, text_of(named["cls_token"]), text_of(named["sep_token"]))
        else:
            add_ends(made, folder, config, of_class.names)
        backend = TokenizersBackend(made)
        backend.decode(backend.encode("a", add_special_tokens=True), skip_special_tokens=False)
        return backend


def _vocabulary(path: Path) -> dict[str, int]:
    """The tokens' ids, each of one token only. Raises ModelError."""
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
