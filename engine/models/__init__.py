"""Model families: from a Hugging Face config to a DecoderSpec and the names of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelError
from ..files.wording import shown
from .config import ConfigReader
from .description import ModelDescription
from .families import FAMILIES

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelDescription", "describe"]

SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(sorted(FAMILIES))


def describe(config: Mapping[str, Any], max_model_len: int | None = None) -> ModelDescription:
    """Describes the model of a config: its decoder, and where its weights are.

    `max_model_len`, in tokens, is the length that the model will be served with. None means the longest for which a
    rope scheme that depends on the length stays unextended (see `rope.py`). `spec.max_positions` is that length then.

    Raises ModelError for an architecture or an option that is not supported, and for a `max_model_len` that is more
    than the model can do.
    """
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in FAMILIES:
        what = f"architecture {shown(name)} is" if name else "a config.json without architectures is"
        raise ModelError(f"{what} not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    reader = ConfigReader(config)
    reader.refuse("per_layer_config")
    description = FAMILIES[name](name, reader, max_model_len)
    longest = description.spec.max_positions
    if max_model_len is not None and max_model_len > longest:
        raise ModelError(f"a context of {max_model_len} tokens is more than this model's {longest}")
    return description
