"""The options of LoRA adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from msgspec import Struct

from ..declaring.option import Options, option
from ..declaring.record import record
from ..declaring.values import at_least, between, count
from ..weights.dtypes import DType

_MAX_RANK = 512
_MAX_FACTOR = 1024
_FIELDS = {"name", "path", "base_model_name"}


class LoraModule(Struct, frozen=True):
    """An adapter that is served under `name`, from a folder of peft, a GGUF file or a hub id. `base_model_name` is its
    parent.
    """

    name: str
    path: str
    base_model_name: str | None = None


class HubModule(LoraModule, frozen=True, kw_only=True):
    """An adapter whose `path` is a hub id, of one commit."""

    revision: str


def parse_lora_module(text: str) -> LoraModule | list[LoraModule]:
    """NAME=PATH, a JSON object with name and path, or a JSON list of those. Raises ValueError for anything else."""
    if not text.lstrip().startswith(("{", "[")):
        name, found, path = text.partition("=")
        if not (name and found and path):
            raise ValueError(f"must be NAME=PATH or a JSON object with name and path, got {text!r}")
        return LoraModule(name, path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    return [_from_json(item) for item in value] if isinstance(value, list) else _from_json(value)


def _from_json(value: object) -> LoraModule:
    if (
        not isinstance(value, dict)
        or not {"name", "path"} <= value.keys() <= _FIELDS
        or not all(value[key] and isinstance(value[key], str) for key in ("name", "path"))
        or not isinstance(value.get("base_model_name", ""), str | None)
    ):
        raise ValueError('must be NAME=PATH or a JSON object {"name": ..., "path": ..., "base_model_name": ...}')
    return LoraModule(**value)


def _factors(text: str) -> list[float]:
    """4.0,8.0. Raises ValueError for anything else."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"must be numbers with commas between them, such as 4.0,8.0, got {text!r}") from None


def _is_a_factor(value: float) -> str | None:
    return None if 1 <= value <= _MAX_FACTOR else f"must be between 1 and {_MAX_FACTOR}"


@record(frozen=True)
class LoraOptions(Options):
    """Which adapters are served, how many at once, and how they are stored. Raises OptionError."""

    enable_lora: bool = option(False, "serve LoRA adapters of the model")
    lora_modules: Sequence[LoraModule] = option(
        (),
        'adapters to serve: NAME=PATH, or {"name": ..., "path": ..., "base_model_name": ...}; a path may be a hub id',
        parse=parse_lora_module,
        metavar="MODULE",
    )
    max_loras: int = option(
        1,
        "most adapters in one step; requests for others wait",
        parse=count,
        check=at_least(1),
        metavar="N",
    )
    max_lora_rank: int = option(
        16, "the highest rank that an adapter may have", parse=count, check=between(1, _MAX_RANK), metavar="RANK"
    )
    max_cpu_loras: int | None = option(
        None,
        "most adapters in memory; others are read from disk again when a request needs them [--max-loras, or the "
        "number of --lora-modules]",
        parse=count,
        check=at_least(1),
        metavar="N",
    )
    lora_dtype: DType | Literal["auto"] = option(
        "auto", "the type of adapters' weights; auto is the model's", choices=("auto", *get_args(DType))
    )
    lora_extra_vocab_size: int | None = option(
        None, "accepted for compatibility: adapters cannot add tokens", parse=count, metavar="N"
    )
    long_lora_scaling_factors: Sequence[float] = option(
        (),
        "by which factors the contexts of adapters may exceed the model's, for adapters with a context_length",
        parse=_factors,
        check=_is_a_factor,
        metavar="FACTOR,...",
    )
    fully_sharded_loras: bool = option(False, "accepted for compatibility: adapters are not sharded")
    allow_runtime_lora_updating: bool = option(
        False,
        "let clients load and unload adapters, from any path of this machine or the hub, with /v1/load_lora_adapter",
        env_aliases=("VLLM_ALLOW_RUNTIME_LORA_UPDATING",),
    )
    lora_resolver_cache_dir: str | None = option(
        None,
        "a folder of adapters; each is loaded when a request first names it",
        metavar="FOLDER",
        env_aliases=("VLLM_LORA_RESOLVER_CACHE_DIR",),
    )

    @property
    def max_in_memory(self) -> int:
        """How many adapters are kept in memory."""
        return self.max_cpu_loras or max(self.max_loras, len(self.lora_modules))

    def _contradictions(self) -> Iterator[str]:
        if not self.enable_lora:
            yield from self._needing(("lora_modules",), "--enable-lora")
        if self.lora_extra_vocab_size not in (None, 0, 256):
            yield (
                f"--lora-extra-vocab-size {self.lora_extra_vocab_size} is not supported: adapters that add tokens are "
                "refused; leave it out"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            yield f"--max-cpu-loras {self.max_cpu_loras} must be at least --max-loras {self.max_loras}"
        names = [module.name for module in self.lora_modules]
        if len(set(names)) != len(names):
            yield "--lora-modules: two adapters have the same name"

    def without_effect(self) -> Iterator[str]:
        """What to tell of the flags that were given and have no effect."""
        if self.given_flags(["fully_sharded_loras"]):
            yield "--fully-sharded-loras has no effect: adapters are not sharded here"
        if self.lora_extra_vocab_size is not None:
            yield "--lora-extra-vocab-size has no effect: adapters cannot add tokens"
        if not self.enable_lora:
            idle = self.given_flags(_OF_ADAPTERS)
            yield from (f"{flag} has no effect without --enable-lora" for flag in idle)


_OF_ADAPTERS = (
    "max_loras",
    "max_lora_rank",
    "max_cpu_loras",
    "lora_dtype",
    "allow_runtime_lora_updating",
    "lora_resolver_cache_dir",
    "long_lora_scaling_factors",
)
