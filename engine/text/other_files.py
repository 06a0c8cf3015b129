"""Tokenizers of folders without a `tokenizer.json`. Transformers reads those that nothing else can."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..files.reading import MAX_TOKENIZER_BYTES, is_there, require_file, require_no_special_files
from ..install_hint import install_command
from .added_tokens import tokenizer_class
from .byte_level import load_byte_level
from .sentencepieces import SENTENCEPIECE_MODELS, load_sentencepieces, sentencepiece_file
from .tiktoken_ranks import load_tiktoken
from .tokenizer_backends import TokenizerBackend, load_with_transformers

_LEGACY_FILES = ("vocab.json", "vocab.txt", "merges.txt", *SENTENCEPIECE_MODELS, "tokenizer_config.json")
_MISTRAL_FILES = ("tekken.json", "tokenizer.model.v*")


def load_other_files(folder: Path, config: Mapping[str, Any]) -> TokenizerBackend:
    """The tokenizer in a folder, whose `tokenizer_config.json` is `config`. Raises ModelError if there is none or it is
    broken.
    """
    class_name = tokenizer_class(folder, config)
    if (found := sentencepiece_file(folder)) and (made := load_sentencepieces(found, config, class_name)):
        return made
    if made := load_tiktoken(folder, config):
        return made
    if any(any(folder.glob(name)) for name in _MISTRAL_FILES):
        raise ModelError(
            f"{folder} has only Mistral's own tokenizer: --tokenizer-mode mistral reads it, with mistral-common "
            f"({install_command('mistral')}); or add a tokenizer.json, or name another folder with --tokenizer"
        )
    if legacy := [path for name in _LEGACY_FILES if is_there(path := folder / name)]:
        require_no_special_files(folder)
        for path in legacy:
            require_file(path, MAX_TOKENIZER_BYTES)
        return load_byte_level(folder, config, class_name) or load_with_transformers(folder)
    raise ModelError(
        f"{folder} has no tokenizer: add the model's tokenizer.json (or tokenizer.model) and tokenizer_config.json, "
        "or name another folder with --tokenizer"
    )
