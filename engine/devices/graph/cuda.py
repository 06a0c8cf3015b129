"""NVIDIA GPUs: CUDA graphs in one pool (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import DeviceError
from ...weights.dtypes import DType
from .adapter import DeviceMemory
from .attention import PlanAttention, no_plan
from .flex_attention import paged_flex_attention, plan_flex_attention
from .options import GraphOptions


class CudaAdapter:
    """One GPU. With `enforce_eager` nothing is compiled or captured. Raises DeviceError if torch finds no GPU."""

    name = "cuda"
    dtypes: tuple[DType, ...] = ("bfloat16", "float16", "float32")
    block_size = 128  # FlexAttention's kernels take that many keys at a time, or a part of them
    chunked_prefill = True
    max_prefill_seqs: int | None = None
    compiles_only_layers = True  # inductor takes a minute for 32 of them, and graphs make calls cheap
    has_float64 = True
    attend = staticmethod(paged_flex_attention)

    def __init__(self, options: GraphOptions) -> None:
        if not torch.cuda.is_available():
            built = "" if torch.version.cuda else f"; torch {torch.__version__} is built without CUDA"
            raise DeviceError(
                f"torch finds no GPU{built}: see that nvidia-smi lists one (docker run --gpus all) and that "
                "CUDA_VISIBLE_DEVICES does not hide it"
            )
        self.device = torch.device("cuda", 0)
        # What is not compiled gathers whole tables, and needs no plan.
        self.captures = self.any_width = not options.enforce_eager
        self.plan_attention: PlanAttention = plan_flex_attention if self.captures else no_plan
        self.enter()
        # Only one graph runs at a time, so that all can use the same memory for what is within.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        """Make it the thread's device."""
        torch.cuda.set_device(self.device)

    def memory(self) -> DeviceMemory:
        """What the driver has. Memory that torch keeps for the next launch is not free."""
        return DeviceMemory(*torch.cuda.mem_get_info(self.device))

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.device)

    def mark(self) -> Callable[[], None]:
        """What waits for an event behind all that the GPU was asked for."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as torch.compile makes it."""
        if not self.captures:
            return function
        compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False)
        return compiled

    def run(self, launch: Callable[[], None]) -> None:
        """Ask for it."""
        launch()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Record it on a stream of its own. Other threads may use the GPU meanwhile."""
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay
