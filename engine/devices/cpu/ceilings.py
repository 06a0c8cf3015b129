"""Which of a processor's measured limits a model's arithmetic has: the names are `_native.measure_ceilings`'s."""

from __future__ import annotations

from typing import Final

from ...weights.dtypes import DType
from ...weights.quantization import Method

MEMORY_READ: Final = "read_bytes_per_second"

_OF_FORMAT: dict[str, str] = {
    "bfloat16": "bfloat16_flops",
    "float16": "float32_flops",  # float16 weights are widened: they save memory traffic, not arithmetic
    "float32": "float32_flops",
    "int8": "int8_ops",
    "int8-channel": "int8_ops",
    "int4": "int8_ops",  # int4 weights are widened, too
}


def compute_ceiling(dtype: DType, method: Method | None, *, keeps_bits: bool) -> str:
    """The ceiling of products with weights that the device keeps like this."""
    return _OF_FORMAT[method or ("int8" if keeps_bits else dtype)]
