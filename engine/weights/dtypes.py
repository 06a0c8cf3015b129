"""The number formats of weights, and how they are held in numpy, which has no bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..files.wording import shown

DType = Literal["float32", "bfloat16", "float16"]
# fp8_e5m2 rounds to 2 bits of mantissa, and fp8_e4m3 to 3, with a scale for K and one for V of a layer. int8 keeps a
# scale for each token and KV head, and int4 one for each group of 32 elements of a head.
KvCacheDType = Literal["float32", "bfloat16", "float16", "fp8_e5m2", "fp8_e4m3", "int8", "int4"]

STORAGE: dict[DType, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


def dtype_from_config(config: Mapping[str, Any]) -> DType:
    """The dtype that a config gives its weights, under its new name or its old one; float32 where it is silent."""
    try:
        return parse_dtype(config.get("dtype") or config.get("torch_dtype") or "float32")
    except ModelError as error:
        raise ModelError(f"config.json: {error}") from None


def parse_dtype(name: object) -> DType:
    """The dtype of that name. Raises ModelError with the list of those there are."""
    for dtype in STORAGE:
        if name == dtype:
            return dtype
    raise ModelError(f"dtype must be one of {', '.join(STORAGE)}, got {shown(name)}")


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Finite float32 values rounded to the nearest bfloat16, ties to even, as bits. Same shape."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
