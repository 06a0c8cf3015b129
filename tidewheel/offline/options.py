"""Keyword arguments as options: the names of the command line's flags, with Python's values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidewheel.engine.declaring.option import Option, OptionError, options_of
from tidewheel.engine.encoders.options import EncoderOptions
from tidewheel.engine.options import EngineOptions
from tidewheel.server.app_options import AppOptions
from tidewheel.server.options.model import MODEL_OPTIONS, engine_options
from tidewheel.server.options.parser import build

RUNNERS = ("auto", "generate", "pooling")

_ENCODER_OPTIONS = options_of(EncoderOptions)
_APP_OPTIONS = [o for o in options_of(AppOptions) if o.name in ("chat_template", "generation_config")]
_OPTIONS: Mapping[str, Option] = {o.name: o for o in (*MODEL_OPTIONS, *_ENCODER_OPTIONS, *_APP_OPTIONS)}


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """What an LLM was told. `engine` is None for one that runs encoders alone."""

    engine: EngineOptions | None
    encoders: EncoderOptions
    app: AppOptions


def offline_options(model: str | None, runner: str, given: Mapping[str, Any]) -> OfflineOptions:
    """The options of keyword arguments; an argument that is None counts as left out. `model` None is the embedded one.

    With the runner "pooling", the model is an encoder. Raises TypeError for an argument that does not exist,
    OptionError for a value that cannot be used.
    """
    if runner not in RUNNERS:
        raise OptionError(f"runner must be one of {', '.join(RUNNERS)}, got {runner!r}")
    read = {name: _read(name, value) for name, value in given.items() if value is not None}
    if runner != "pooling":
        named = {} if model is None else {"model": model}
        engine = engine_options({**read, **named})
    elif model is None:
        raise OptionError("runner='pooling' needs a model: an embedding model's folder or hub id")
    else:
        read["embedding_model"], engine = (model, *read.get("embedding_model", ())), None
    return OfflineOptions(engine=engine, encoders=build(EncoderOptions, read), app=build(AppOptions, read))


def _read(name: str, value: Any) -> Any:
    option = _OPTIONS.get(name)
    if option is None:
        close = difflib.get_close_matches(name, _OPTIONS, 1)
        hint = f"; did you mean {close[0]}?" if close else "; the options are those of `tidewheel serve --help`"
        raise TypeError(f"LLM has no option {name}{hint}")
    if option.takes_several:
        return (value,) if isinstance(value, str) else tuple(value)
    if not isinstance(value, str):
        return value
    try:
        return option.read(value)
    except ValueError as error:
        raise OptionError(f"{name}: {error}") from None
