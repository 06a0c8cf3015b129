"""A model's settings for generating: the tokens that end a sequence, and the sampling its authors suggest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from ..declaring.record import record
from ..errors import InvalidRequestError, ModelError
from ..files.folder import read_json_if_there
from ..files.wording import one_line, shown
from .config import MAX_INTEGER

_FILE = "generation_config.json"
SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""The sampling fields that may be suggested. `max_new_tokens` is a limit for all requests, as in vLLM."""

_MAX_SPECIAL_TOKENS = 1000  # that end a sequence; models name a handful


@record(frozen=True, slots=True)
class GenerationConfig:
    """`eos_token_ids` may be empty. A sampling field is None where nothing is suggested. `origin` names the file."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    origin: str = field(default=_FILE, compare=False)


def read_generation_config(folder: Path, config: Mapping[str, Any]) -> GenerationConfig:
    """What `generation_config.json` says, and where it is silent about special tokens, `config`.

    The end tokens of both files count: chat models often have the base model's in one and the end of a turn in the
    other. `do_sample: false` is not a suggestion of temperature 0: it is merely transformers' default.

    Raises ModelError, naming the field, for a value of the wrong kind.
    """
    path, config_path = folder / _FILE, folder / "config.json"
    values = read_json_if_there(path)
    end_tokens = (*token_ids(values, "eos_token_id", path), *token_ids(config, "eos_token_id", config_path))
    begin_tokens = token_ids(values, "bos_token_id", path) or token_ids(config, "bos_token_id", config_path)
    return GenerationConfig(
        eos_token_ids=tuple(dict.fromkeys(end_tokens)),
        bos_token_id=begin_tokens[0] if begin_tokens else None,
        temperature=_number(values, "temperature", path),
        top_p=_number(values, "top_p", path),
        top_k=_integer(values, "top_k", path),
        min_p=_number(values, "min_p", path),
        repetition_penalty=_number(values, "repetition_penalty", path),
        max_new_tokens=_integer(values, "max_new_tokens", path),
        origin=str(path),
    )


def sampling_defaults(generation: GenerationConfig) -> dict[str, float | int]:
    """The sampling that is suggested, by the names of `SamplingParams`, for requests that leave it open.

    `max_tokens` is also the most that a request may have. Raises ModelError, naming the field, for a value that a
    request could not have either.
    """
    from ..sampling_params import SamplingParams  # which a start need not wait for

    defaults = {name: value for name in SAMPLING_NAMES if (value := getattr(generation, name)) is not None}
    most = defaults.pop("max_new_tokens", None)
    if most is not None:
        if type(most) is not int or not 1 <= most <= MAX_INTEGER:
            raise ModelError(f"{generation.origin}: max_new_tokens must be an integer above 0, got {shown(most)}")
        defaults["max_tokens"] = most
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ModelError(f"{generation.origin}: {one_line(error)}") from error
    return defaults


def token_ids(values: Mapping[str, Any], name: str, path: Path) -> tuple[int, ...]:
    """The ids of a field that has one, several or none. Raises ModelError, naming `path` as its file."""
    value = values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= MAX_INTEGER for i in ids):
        raise ModelError(f"{path}: {name} must be a token id or a list of them, got {shown(value)}")
    if len(ids) > _MAX_SPECIAL_TOKENS:
        raise ModelError(f"{path}: {name} has {len(ids)} tokens, more than the {_MAX_SPECIAL_TOKENS} there may be")
    return tuple(ids)


def _number(values: Mapping[str, Any], name: str, path: Path) -> float | None:
    value = values.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ModelError(f"{path}: {name} must be a number, got {shown(value)}")
    return value


def _integer(values: Mapping[str, Any], name: str, path: Path) -> int | None:
    value = _number(values, name, path)
    if isinstance(value, float) and not value.is_integer():
        raise ModelError(f"{path}: {name} must be an integer, got {shown(value)}")
    return None if value is None else int(value)
