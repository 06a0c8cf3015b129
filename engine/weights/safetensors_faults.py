"""Which tensor of a safetensors file is at fault. The library that refuses such a file does not always say it."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..files.wording import in_bytes, shown

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

_MAX_DIMS = 64  # as numpy has it


def tensor_at_fault(path: Path, max_header_bytes: int) -> str | None:
    """The first tensor that contradicts the file, and how, in words; None if the header itself cannot be read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, max_header_bytes)))
        size = path.stat().st_size - 8 - length
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(header, dict):
        return None
    header.pop("__metadata__", None)
    return fault_in(header, size)


def fault_in(header: Mapping[str, Any], size: int) -> str | None:
    """As `tensor_at_fault`, of what a header says of each tensor, for tensors of `size` bytes."""
    names, begins, stops = list[str](), array("Q"), array("Q")
    for name, entry in header.items():
        if fault := _fault_of(entry):
            return f"tensor {shown(name)} {fault}"
        begin, stop = entry["data_offsets"]
        names.append(name)
        begins.append(begin)
        stops.append(stop)
    # Sorted by numpy, which lets other threads run meanwhile.
    order = np.lexsort((np.frombuffer(stops, np.uint64), np.frombuffer(begins, np.uint64)))
    end, before = 0, ""
    for begin, stop, name in ((begins[i], stops[i], names[i]) for i in order):
        if begin < end:
            return f"tensors {shown(before)} and {shown(name)} overlap"
        if stop > size:
            return f"tensor {shown(name)} ends {in_bytes(stop - size)} past its end"
        if begin > end:
            return f"tensor {shown(name)} begins {in_bytes(begin - end)} behind the tensor before it"
        end, before = stop, name
    return None if end == size else f"there are {in_bytes(size - end)} behind its last tensor"


def _fault_of(entry: Any) -> str | None:
    """What is wrong with a tensor by itself."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        return f"is stored as {shown(dtype)}, which is not a type of safetensors"
    if shape is None:
        return f"has the shape {shown(fields.get('shape'))}"
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"has the offsets {shown(fields.get('data_offsets'))}"
    needed = -(-math.prod(shape) * _BITS[dtype] // 8)
    if needed >= 1 << 64:
        return f"has the shape {shown(shape)}, which is too large for any file"
    if needed != offsets[1] - offsets[0]:
        return f"has {in_bytes(offsets[1] - offsets[0])}, but its shape and type need {in_bytes(needed)}"
    return None


def _sizes(values: object) -> list[int] | None:
    """The values, if they are sizes, and not so many that their product would take long."""
    if not isinstance(values, list) or len(values) > _MAX_DIMS:
        return None
    return values if all(type(value) is int and 0 <= value < 2**64 for value in values) else None
