"""torch.xpu as its documentation and source describe it, for one device: memory, streams, and graphs in pools.

https://docs.pytorch.org/docs/2.13/xpu.html, and for what graphs refuse
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/xpu/XPUGraph.cpp
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engine.devices.fakes.accelerator import GIB, Accelerator
from engine.devices.fakes.cuda import FakeCuda, FakeCudaGraph, FakeStream
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


class FakeXpu(FakeCuda):
    """What replaces torch.xpu. An integrated GPU does not tell its free memory; older torch has no graphs."""

    def __init__(
        self, total_bytes: int = GIB, *, integrated: bool = False, has_fp64: bool = True, has_graphs: bool = True
    ) -> None:
        super().__init__(total_bytes)
        self.accelerator = Accelerator("xpu", total_bytes, refuses=_allowed if has_fp64 else _refuse_float64)
        self._integrated, self._has_graphs = integrated, has_graphs
        self._properties = SimpleNamespace(total_memory=total_bytes, has_fp64=has_fp64)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Put this in the place of torch.xpu."""
        self.put_into(
            monkeypatch,
            torch.xpu,
            XPUGraph=lambda: FakeXpuGraph(self),
            mem_get_info=self._mem_get_info,
            memory_reserved=lambda device=None: self.accelerator.taken_bytes,
            get_device_properties=lambda device=None: self._properties,
        )
        if not self._has_graphs:
            monkeypatch.delattr(torch.xpu, "XPUGraph")
            monkeypatch.delattr(torch.xpu, "graph_pool_handle")
        return self

    def _mem_get_info(self, device: object = None) -> tuple[int, int]:
        if self._integrated:  # https://github.com/pytorch/pytorch/pull/194487
            raise RuntimeError("The device (Imaginary) doesn't support querying the available free memory.")
        return self.accelerator.memory


def _allowed(func: Any, operands: Sequence[Tensor], compiled: bool) -> None:
    """A GPU with float64 refuses nothing."""


def _refuse_float64(func: Any, operands: Sequence[Tensor], compiled: bool) -> str | None:
    """As SYCL's compiler for a GPU without the aspect fp64: https://github.com/intel/torch-xpu-ops/issues/1742."""
    return (
        "Required aspect fp64 is not supported on the device"
        if any(operand.dtype == torch.float64 for operand in operands)
        else None
    )


class FakeXpuGraph(FakeCudaGraph):
    """A graph. It takes no error mode, and is captured on the stream where its capture began."""

    _stream: FakeStream

    def capture_begin(self, pool: object = None) -> None:  # type: ignore[override]
        """Record what follows."""
        super().capture_begin(pool)
        self._stream = torch.xpu.current_stream()  # type: ignore[assignment]

    def capture_end(self) -> None:
        """The graph is complete."""
        assert torch.xpu.current_stream() is self._stream, "Capture must end on the same stream it began on."
        super().capture_end()
