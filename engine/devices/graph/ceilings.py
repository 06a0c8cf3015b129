"""Measures the most that a device can do: copy its memory, and multiply matrices in one type."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ...weights.dtypes import DType
from .adapter import Adapter

_COPIED_BYTES = 256 * 2**20  # several times the caches of today's devices
_SIDE = 8192  # of square matrices: enough work to hide what a launch costs
_SIDE_ON_PROCESSOR = 1024
_LONG_ENOUGH_S = 0.01  # for one look at the clock, which waits for the device


def measure_ceilings(adapter: Adapter, dtype: DType, seconds: float) -> dict[str, float]:
    """The most bytes a second that a copy reads and writes, and the most FLOPs a second of a product of matrices.

    The names are `copy_bytes_per_second` and `<dtype>_flops`. It takes about `seconds`, and at most half of the memory
    that is free. It must be called by a thread that has entered the adapter, between steps.
    """
    copied = _copied_bytes_per_second(adapter, seconds / 2)
    return {"copy_bytes_per_second": copied, f"{dtype}_flops": _flops(adapter, getattr(torch, dtype), seconds / 2)}


def _copied_bytes_per_second(adapter: Adapter, seconds: float) -> float:
    size = min(_COPIED_BYTES, adapter.memory().free // 4)
    source = torch.ones(size, dtype=torch.uint8, device=adapter.device)
    target = torch.empty_like(source)
    return 2 * size / _fastest(adapter, lambda: target.copy_(source), seconds)


def _flops(adapter: Adapter, dtype: torch.dtype, seconds: float) -> float:
    side = _SIDE_ON_PROCESSOR if adapter.device.type == "cpu" else _SIDE
    while side > 1 and 3 * side**2 * dtype.itemsize > adapter.memory().free // 2:
        side //= 2
    left = torch.ones(side, side, dtype=dtype, device=adapter.device)
    right, product = torch.ones_like(left), torch.empty_like(left)
    return 2 * side**3 / _fastest(adapter, lambda: torch.mm(left, right, out=product), seconds)


def _fastest(adapter: Adapter, launch: Callable[[], object], seconds: float) -> float:
    """The least seconds that one launch took of those that fit into the time, without the first, which may compile."""

    def run() -> None:
        launch()

    adapter.run(run)
    adapter.synchronize()
    end = time.perf_counter() + seconds
    fastest, count = float("inf"), 1
    while (started := time.perf_counter()) < end or fastest == float("inf"):
        for _ in range(count):
            adapter.run(run)
        adapter.synchronize()
        took = time.perf_counter() - started
        fastest = min(fastest, took / count)
        if took < _LONG_ENOUGH_S:
            count *= 2
    return fastest
