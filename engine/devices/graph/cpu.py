"""The graph executor on the CPU: for its tests, and to try buckets without an accelerator."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

from ...errors import DeviceError
from ...machine.memory import read_memory
from ...weights.dtypes import DType
from .adapter import DeviceMemory
from .attention import gather_attention, no_plan
from .options import GraphOptions


class CpuAdapter:
    """Torch on the CPU. Its graphs are compiled functions, which are called again on the same tensors.

    With `enforce_eager` nothing is compiled. `backend` is torch.compile's. Raises DeviceError if that needs a compiler
    which is not there.
    """

    name = "graph-cpu"
    device = torch.device("cpu")
    dtypes: tuple[DType, ...] = ("float32", "bfloat16", "float16")
    block_size = 16
    chunked_prefill = True
    max_prefill_seqs: int | None = None
    captures = True
    compiles_only_layers = False
    has_float64 = True
    attend = staticmethod(gather_attention)
    plan_attention = staticmethod(no_plan)
    any_width = False

    def __init__(self, options: GraphOptions, backend: str = "inductor") -> None:
        self._is_eager = options.enforce_eager
        self._backend = backend
        compiler = os.environ.get("CXX", "g++")
        if backend == "inductor" and not self._is_eager and shutil.which(compiler) is None:
            raise DeviceError(
                f"torch.compile makes code for the graph-cpu device with {compiler}, which is not installed: install "
                "it, name another one with CXX, or take --enforce-eager"
            )

    def enter(self) -> None:
        """Nothing: any thread may use it."""

    def memory(self) -> DeviceMemory:
        """The machine's, as far as this process may use it."""
        memory = read_memory()
        return DeviceMemory(memory.available or 0, memory.ceiling or 0)

    def synchronize(self) -> None:
        """Nothing: operations are done when they return."""

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as torch.compile makes it."""
        if self._is_eager:
            return function
        compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False, backend=self._backend)
        return compiled

    def run(self, launch: Callable[[], None]) -> None:
        """Call it."""
        launch()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """The launch itself: it finds its inputs and outputs where they were."""
        return launch
