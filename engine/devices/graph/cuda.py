"""NVIDIA GPUs: CUDA graphs in one pool (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar

import torch

from ...errors import DeviceError
from ...weights.dtypes import DType
from .adapter import DeviceMemory
from .attention import PlanAttention, no_plan
from .gpu_attention import gpu_attention, plan_gpu_attention
from .options import GraphOptions


class CudaAdapter:
    """One GPU. With `enforce_eager` nothing is compiled or captured. Raises DeviceError if torch finds no GPU.

    Torch has other vendors' GPUs in the same form, in a module of its own or in this one.
    """

    name = "cuda"
    dtypes: tuple[DType, ...] = ("bfloat16", "float16", "float32")
    block_size = 128  # FlexAttention's kernels take that many keys at a time, or a part of them
    chunked_prefill = True
    max_prefill_seqs: int | None = None
    compiles_only_layers = True  # inductor takes a minute for 32 of them, and graphs make calls cheap
    has_float64 = True

    _gpus: ClassVar[ModuleType] = torch.cuda
    _device_type = "cuda"
    _built_for = ("cuda", "CUDA")  # by its name in torch.version, and in words
    _where_to_look = "nvidia-smi lists one (docker run --gpus all) and that CUDA_VISIBLE_DEVICES does not hide it"
    _graph = "CUDAGraph"
    _capture_options: ClassVar[Mapping[str, str]] = {"capture_error_mode": "thread_local"}  # others may use the GPU

    def __init__(self, options: GraphOptions) -> None:
        if not self._gpus.is_available():
            key, what = self._built_for
            built = "" if getattr(torch.version, key, None) else f"; torch {torch.__version__} is built without {what}"
            raise DeviceError(f"torch finds no GPU{built}: see that {self._where_to_look}")
        self.device = torch.device(self._device_type, 0)
        # What is not compiled gathers whole tables, and needs no plan.
        self._is_compiled = self.any_width = not options.enforce_eager
        self.captures = self._is_compiled and hasattr(self._gpus, self._graph)
        self.attend = gpu_attention(self.device, self.block_size)
        plan = plan_gpu_attention(self.device, self.block_size)
        self.plan_attention: PlanAttention = plan if self._is_compiled else no_plan
        self.enter()
        if self.captures:
            # Only one graph runs at a time, so that all can use the same memory for what is within.
            self._pool, self._stream = self._gpus.graph_pool_handle(), self._gpus.Stream(self.device)

    def enter(self) -> None:
        """Make it the thread's device."""
        self._gpus.set_device(self.device)

    def memory(self) -> DeviceMemory:
        """What the driver has. Memory that torch keeps for the next launch is not free."""
        return DeviceMemory(*self._gpus.mem_get_info(self.device))

    def synchronize(self) -> None:
        """Wait for the GPU."""
        self._gpus.synchronize(self.device)

    def mark(self) -> Callable[[], None]:
        """What waits for an event behind all that the GPU was asked for."""
        event = self._gpus.Event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as torch.compile makes it."""
        if not self._is_compiled:
            return function
        compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False)
        return compiled

    def run(self, launch: Callable[[], None]) -> None:
        """Ask for it."""
        launch()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Record it on a stream of its own."""
        graph = getattr(self._gpus, self._graph)()
        self.synchronize()
        with self._gpus.stream(self._stream):
            graph.capture_begin(pool=self._pool, **self._capture_options)
            try:
                launch()
            finally:
                graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay
