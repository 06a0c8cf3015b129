"""Keyword arguments as options: the names of the command line's flags, with Python's values."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.engine.declaring.mistakes import Mistakes, made
from tidewheel.engine.declaring.option import Option, OptionError, options_of
from tidewheel.engine.encoders.options import EncoderOptions
from tidewheel.engine.options import EngineOptions
from tidewheel.server.app_options import AppOptions
from tidewheel.server.options.model import MODEL_OPTIONS, engine_options
from tidewheel.server.options.parser import build
from tidewheel.server.options.replicas import ReplicaOptions

from .vllm_arguments import take_vllm_arguments

_ENCODER_OPTIONS = options_of(EncoderOptions)
_OF_PROMPTS = ("chat_template", "generation_config", "override_generation_config")
_APP_OPTIONS = [o for o in options_of(AppOptions) if o.name in _OF_PROMPTS]
_OF_STAGES = ("distributed_executor_backend", "cpus_per_replica")
_STAGE_OPTIONS = [o for o in options_of(ReplicaOptions) if o.name in _OF_STAGES]
OFFLINE_OPTIONS: Mapping[str, Option] = {
    o.name: o for o in (*MODEL_OPTIONS, *_ENCODER_OPTIONS, *_APP_OPTIONS, *_STAGE_OPTIONS)
}
"""The options that an LLM has, by name."""


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """The options of an LLM. If the model is an encoder, `engine` says how to load it.

    `notes` are for the log: what was given and has no effect.
    """

    engine: EngineOptions
    encoders: EncoderOptions
    app: AppOptions
    replicas: ReplicaOptions
    notes: Sequence[str] = field(default=(), compare=False)


def offline_options(model: str | None, runner: str | None, given: Mapping[str, Any]) -> OfflineOptions:
    """The options of keyword arguments; an argument that is None counts as left out. `model` None is the embedded one.

    vLLM's arguments without effect are `notes`. Raises TypeError for an argument that does not exist, OptionError for
    all values that cannot be used or are not supported.
    """
    wanted = {name: value for name, value in {"runner": runner, **given}.items() if value is not None}
    mistakes = Mistakes()
    ours, notes = take_vllm_arguments(wanted, OFFLINE_OPTIONS, mistakes)
    read = {}
    for name, value in ours.items():
        try:
            read[name] = _read(name, value)
        except OptionError as error:
            mistakes.add_all(error)
    engine = mistakes.attempt(engine_options, read if model is None else {**read, "model": model})
    encoders, app = mistakes.attempt(build, EncoderOptions, read), mistakes.attempt(build, AppOptions, read)
    replicas = mistakes.attempt(build, ReplicaOptions, read)
    if model is None and encoders is not None and encoders.meant_runner == "pooling":
        mistakes.add("runner='pooling' needs a model: an embedding model's folder or hub id")
    if read.get("distributed_executor_backend") == "ray" and engine is not None and engine.pipeline.stages == 1:
        mistakes.add(
            "distributed_executor_backend='ray' places the stages of a pipeline, so it needs pipeline_parallel_size of "
            "2 or more; `tidewheel serve` starts replicas (docs/scale-out.md)"
        )
    mistakes.raise_any()
    return OfflineOptions(
        engine=made(engine), encoders=made(encoders), app=made(app), replicas=made(replicas), notes=notes
    )


def no_such_option(owner: str, name: str) -> TypeError:
    """The error for an argument that does not exist, with the one that may have been meant."""
    close = difflib.get_close_matches(name, OFFLINE_OPTIONS, 1)
    hint = f"did you mean {close[0]}?" if close else "the options are those of `tidewheel serve --help`"
    return TypeError(f"{owner} has no option {name}; {hint}")


def _read(name: str, value: Any) -> Any:
    option = OFFLINE_OPTIONS.get(name)
    if option is None:
        raise no_such_option("LLM", name)
    if option.is_switch and not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, got {value!r}")
    try:
        if not option.takes_several:
            return option.read(value) if isinstance(value, str) else value
        is_one = isinstance(value, str | Mapping) or not isinstance(value, Iterable)
        return tuple(_items(option, [value] if is_one else value))
    except ValueError as error:
        raise OptionError(f"{name}: {error}") from None


def _items(option: Option, values: Iterable[Any]) -> Iterator[Any]:
    """The values of one that takes several: texts, numbers and paths as a command line has them, dicts as its JSON."""
    for value in values:
        text = json.dumps(value, default=str) if isinstance(value, Mapping) else value
        if isinstance(text, int | float | os.PathLike):
            text = str(text)
        read = option.read(text) if isinstance(text, str) else value
        yield from read if isinstance(read, list) else [read]
