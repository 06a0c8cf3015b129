"""Model families: from a Hugging Face config to a DecoderSpec and the names of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ModelError
from .config import ConfigReader
from .description import ModelDescription
from .families import FAMILIES, family_of
from .text_part import WRAPPERS, as_text_part, text_part
from .unsupported import unsupported

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelDescription", "describe"]

SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(sorted(FAMILIES))


def describe(config: Mapping[str, Any], max_model_len: int | None = None) -> ModelDescription:
    """Describes the model of a config: its decoder, and where its weights are.

    `max_model_len`, in tokens, is the length that the model will be served with. None means the longest for which a
    rope scheme that depends on the length stays unextended (see `rope.py`). `spec.max_positions` is that length then.
    Of a model that takes images or sound too, the language model is described.

    Raises ModelError for an architecture or an option that is not supported, and for a `max_model_len` that is more
    than the model can do.
    """
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if isinstance(name, str) and name in WRAPPERS and name not in FAMILIES:
        text = text_part(name, config)
        return as_text_part(name, describe(text, max_model_len), text)
    if not isinstance(name, str) or name not in FAMILIES:
        raise unsupported(name, config, [*SUPPORTED_ARCHITECTURES, *WRAPPERS])
    reader = ConfigReader(config)
    if FAMILIES[name] != "gemma4":
        reader.refuse("per_layer_config")
    description = replace(family_of(name).describe(name, reader, max_model_len), architecture=name)
    longest = description.spec.max_positions
    if max_model_len is not None and max_model_len > longest:
        raise ModelError(
            f"a context of {max_model_len} tokens is more than this model's {longest}: lower --max-model-len, or "
            "extend the context with --rope-scaling or --hf-overrides"
        )
    return description
