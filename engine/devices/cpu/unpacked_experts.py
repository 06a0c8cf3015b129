"""Experts that stay in a checkpoint's mapped files: VLLM_CPU_MOE_PREPACK=0.

A panel is packed when an expert is used, and multiplied right away. The results are the same as if all experts were
packed when they are loaded, which takes memory for all of them, and time once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ...declaring.values import switch
from ...errors import DeviceError
from ...weights.dtypes import STORAGE
from ...weights.quantization import TensorFormat
from ...weights.tensor import WeightSource

PREPACK = "VLLM_CPU_MOE_PREPACK"
_EXPERT = re.compile(r".+\.experts\.\d+\.(gate|up|down)\.weight")


def unpacked_experts(formats: Mapping[str, TensorFormat], weights: WeightSource) -> tuple[frozenset[str], str | None]:
    """The matrices of routed experts that are left in the files: all of them, if that was asked for.

    If it was asked for and is not possible, there are none, and the second value is the reason in words. Raises
    DeviceError if the variable has neither value.
    """
    try:
        prepack = switch(os.environ.get(PREPACK) or "1")
    except ValueError as error:
        raise DeviceError(f"${PREPACK}: {error}; 1 packs experts as they are loaded, 0 leaves them in files") from None
    experts = [name for name in formats if _EXPERT.fullmatch(name)]
    if not experts or prepack:
        return frozenset(), None
    for name in experts:
        if reason := _why_packed(formats[name], weights.stored_format(name)):
            return frozenset(), f"{name} {reason}"
    return frozenset(experts), None


def _why_packed(format: TensorFormat, stored: TensorFormat | None) -> str | None:
    if format.kind in STORAGE:
        return None if stored is None else "is dequantized as it is read"
    if not format.is_stored or (format.block_kind and format != stored):
        return "is quantized by --quantization"
    if format.kind == "grid":
        return "has integers that are reordered during reading"
    return None
