"""The KV cache of devices that keep K and V in the types that they compute in."""

from __future__ import annotations

from ..errors import DeviceError
from ..models.spec import DecoderSpec
from ..weights.dtypes import STORAGE, DType, KvCacheDType
from .cache_split import GroupBytes


def float_cache_dtype(device: str, dtype: KvCacheDType) -> DType:
    """The same type. Raises DeviceError for types of fewer bits, in the name of `device`."""
    for known in STORAGE:
        if dtype == known:
            return known
    raise DeviceError(
        f"the {device} device caches K and V as float32, bfloat16 or float16, not {dtype}: "
        "choose one of them with --kv-cache-dtype, or --device cpu"
    )


def float_group_bytes(device: str, spec: DecoderSpec, dtype: KvCacheDType) -> list[GroupBytes]:
    """What one token takes in each cache group. Raises DeviceError for types of fewer bits."""
    itemsize = STORAGE[float_cache_dtype(device, dtype)].itemsize
    sizes = dict.fromkeys(spec.windows(), 0)
    for shape in spec.caches():
        sizes[shape.window] += shape.values * itemsize
    return [GroupBytes(window, size) for window, size in sizes.items()]
