"""What a model folder says about generating: the tokens that end a sequence, and the sampling its authors suggest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models.folder import read_json


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """`eos_token_ids` may be empty. A sampling field is None where the folder suggests nothing."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_config(folder: Path, config: Mapping[str, Any]) -> GenerationConfig:
    """What `generation_config.json` says, and where it is silent about special tokens, `config`.

    The end tokens of both files count: chat models often have the base model's in one and the end of a turn in the
    other. `do_sample: false` is not a suggestion of temperature 0: it is merely transformers' default.

    Raises ModelError, naming the field, for a value of the wrong kind.
    """
    path, config_path = folder / "generation_config.json", folder / "config.json"
    values = read_json(path) if path.exists() else {}
    end_tokens = (*_token_ids(values, "eos_token_id", path), *_token_ids(config, "eos_token_id", config_path))
    begin_tokens = _token_ids(values, "bos_token_id", path) or _token_ids(config, "bos_token_id", config_path)
    top_k = _number(values, "top_k", path)
    return GenerationConfig(
        eos_token_ids=tuple(dict.fromkeys(end_tokens)),
        bos_token_id=begin_tokens[0] if begin_tokens else None,
        temperature=_number(values, "temperature", path),
        top_p=_number(values, "top_p", path),
        top_k=None if top_k is None else int(top_k),
        min_p=_number(values, "min_p", path),
        repetition_penalty=_number(values, "repetition_penalty", path),
    )


def _token_ids(values: Mapping[str, Any], name: str, path: Path) -> tuple[int, ...]:
    value = values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ModelError(f"{path}: {name} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def _number(values: Mapping[str, Any], name: str, path: Path) -> float | None:
    value = values.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ModelError(f"{path}: {name} must be a number, got {value!r}")
    return value
