"""EncoderSettings: what the options of a command ask of its MODEL, if that is an encoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from ..declaring.option import OptionError, listed, options_of
from ..options import EngineOptions
from .options import Convert, EncoderDType, EncoderOptions

_USED = frozenset(
    "model revision download_dir dtype quantization max_model_len device load_format hf_overrides".split()
)
_CHANGING = (
    "tokenizer tokenizer_revision tokenizer_mode skip_tokenizer_init rope_scaling rope_theta disable_sliding_window"
).split()
"""Options of a chat model that change what it computes: without them an encoder would not be what was asked for."""


class EncoderSettings(Struct, frozen=True, kw_only=True):
    """How to load an encoder. `max_length` is in tokens; None: as the model says. `pooler` is a --pooler-config.

    `is_main`: it is the MODEL of a command, so what it cannot be is refused. Of others that is logged.
    """

    is_main: bool = False
    revision: str | None = None
    dtype: EncoderDType = "auto"
    convert: Convert = "auto"
    pooler: Mapping[str, Any] | None = None
    max_length: int | None = None
    hf_overrides: Mapping[str, Any] | None = None


def pools(engine: EngineOptions, encoders: EncoderOptions) -> bool:
    """Whether MODEL is an encoder, which is served without a chat model.

    Raises ModelError if it is not there, and OptionError for a --pooler-config of one that generates.
    """
    runner = encoders.meant_runner
    if runner != "auto" or engine.load_format == "dummy":
        found = runner == "pooling"
    else:
        from .detection import is_pooling_model

        found = is_pooling_model(engine.model, engine.revision, engine.download_dir)
    if encoders.pooler_config is not None and not found:
        raise OptionError("--pooler-config needs a MODEL that pools: add --runner pooling, or leave it out")
    return found


def settings_of(engine: EngineOptions, encoders: EncoderOptions) -> EncoderSettings:
    """How to load the MODEL of these options. Raises OptionError for what an encoder cannot have."""
    if refused := [*_refused(engine)]:
        raise OptionError(*refused)
    dtype: EncoderDType = encoders.dtype if engine.dtype == "auto" else engine.dtype
    if engine.quantization == "int8" or engine.quantization == "int8-channel":
        dtype = engine.quantization
    return EncoderSettings(
        is_main=True,
        revision=engine.revision,
        dtype=dtype,
        convert=encoders.meant_convert,
        pooler=encoders.pooler_config,
        max_length=engine.max_model_len,
        hf_overrides=engine.hf_overrides,
    )


def without_effect(engine: EngineOptions) -> Iterator[str]:
    """What to tell of the options that were given, and that an encoder has no use for."""
    groups = (engine.media, *engine.device_options)
    unused = engine.given_flags({option.field for option in options_of(EngineOptions)} - _USED)
    unused += [flag for group in groups for flag in group.given_flags()]
    for flag in unused:
        yield f"{flag} has no effect: the model is an encoder, which has no KV cache and generates no text"


def _refused(engine: EngineOptions) -> Iterator[str]:
    changing = [
        *engine.given_flags(_CHANGING),
        *engine.lora.given_flags(),
        *engine.speculative.given_flags(),
        *engine.pipeline.given_flags(),
    ]
    if changing:
        these, them = ("is", "it") if len(changing) == 1 else ("are", "them")
        yield f"{listed(changing)} {these} for models that generate: leave {them} out"
    if engine.device not in ("auto", "cpu"):
        yield f"--device {engine.device} runs no encoders: leave it out, and they run on the processor"
    if engine.quantization not in (None, "int8", "int8-channel"):
        yield f"--quantization {engine.quantization} is for models that generate: encoders have int8 and int8-channel"
    elif engine.quantization is not None and engine.dtype not in ("auto", "bfloat16"):
        yield f"--quantization {engine.quantization} keeps the rest in bfloat16: leave --dtype {engine.dtype} out"
    if engine.load_format != "auto":
        yield f"--load-format {engine.load_format} is for models that generate: leave it out"
