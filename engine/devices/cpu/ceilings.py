"""Which of a processor's measured limits a model's arithmetic has: the names are `_native.measure_ceilings`'s."""

from __future__ import annotations

from typing import Final

from ...weights.dtypes import DType
from ...weights.quantization import Method

MEMORY_READ: Final = "read_bytes_per_second"

_OF_FLOATS: dict[DType, str] = {
    "bfloat16": "bfloat16_flops",
    "float16": "float32_flops",  # float16 weights are widened: they save memory traffic, not arithmetic
    "float32": "float32_flops",
}


def compute_ceiling(dtype: DType, method: Method | None, *, keeps_bits: bool) -> str:
    """The ceiling of products with weights that the device keeps like this."""
    return "int8_ops" if method is not None or keeps_bits else _OF_FLOATS[dtype]
