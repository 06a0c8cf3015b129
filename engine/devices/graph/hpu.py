"""Intel Gaudi cards, through habana_frameworks.torch.

PT_HPU_LAZY_MODE and `enforce_eager` make four modes. Not lazy, the default: torch.compile, or with `enforce_eager`
operations one by one. Lazy, which Intel keeps only for what does not work otherwise: operations accumulate and are
compiled together, and HPU graphs record them unless `enforce_eager` is given.
https://docs.habana.ai/en/latest/PyTorch/PyTorch_Gaudi_Theory_of_Operations.html
https://docs.habana.ai/en/latest/PyTorch/Inference_on_PyTorch/Inference_Using_HPU_Graphs.html
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...errors import DeviceError
from ...weights.dtypes import DType
from .adapter import DeviceMemory
from .attention import no_plan
from .hpu_fp8 import find_fp8
from .hpu_kernels import find_kernels
from .hpu_options import is_lazy
from .options import GraphOptions

logger = logging.getLogger(__name__)


class HpuAdapter:
    """One card. Raises DeviceError if Intel's package is missing or does not find a card."""

    name = "hpu"
    dtypes: tuple[DType, ...] = ("bfloat16", "float16", "float32")
    block_size = 128
    chunked_prefill = False
    max_prefill_seqs: int | None = None
    has_float64 = False
    plan_attention = staticmethod(no_plan)
    any_width = False

    def __init__(self, options: GraphOptions) -> None:
        try:
            import habana_frameworks.torch as htorch
            import habana_frameworks.torch.core as htcore
        except ModuleNotFoundError as error:
            raise DeviceError(
                f"{error.name} is not installed: use the image of Dockerfile.hpu, whose base has Intel's packages"
            ) from error
        if not htorch.hpu.is_available():
            raise DeviceError(
                "habana_frameworks finds no card: see that hl-smi lists one (docker run --runtime=habana -e "
                "HABANA_VISIBLE_DEVICES=all), and that no other process has it"
            )
        self._hpu, self._core = htorch.hpu, htcore
        self._is_lazy = is_lazy()
        self._is_eager = options.enforce_eager
        self.captures = self._is_lazy and not self._is_eager
        # A layer takes the compiler seconds, and each bucket has its own code: as vllm-gaudi's regional compilation.
        self.compiles_only_layers = not self._is_lazy
        self.attend, self.operations = find_kernels()
        self.device = torch.device("hpu", 0)
        if (fp8 := find_fp8(htorch.hpu.get_device_name().upper()[:6], self.device)) is not None:
            self.dtypes = ("bfloat16",)
            self.operations = replace(self.operations, store=fp8.store)
        how = {
            (True, False): "in lazy mode, with HPU graphs; Intel recommends torch.compile, PT_HPU_LAZY_MODE=0",
            (True, True): "in lazy mode, without graphs; Intel recommends torch.compile, PT_HPU_LAZY_MODE=0",
            (False, False): "compiled by torch.compile",
            (False, True): "one operation after the other",
        }
        logger.info("Steps run %s (PT_HPU_LAZY_MODE=%d)", how[self._is_lazy, self._is_eager], self._is_lazy)

    def enter(self) -> None:
        """Make it the thread's device."""
        self._hpu.set_device(self.device)

    def memory(self) -> DeviceMemory:
        """What the driver has."""
        return DeviceMemory(*self._hpu.mem_get_info(self.device))

    def synchronize(self) -> None:
        """Wait for the card, which is asked first for what has accumulated."""
        self._flush()
        self._hpu.synchronize()

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as torch.compile makes it. Lazy mode compiles what it has accumulated, not functions."""
        if self._is_lazy or self._is_eager:
            return function
        compiled: Callable[..., Any] = torch.compile(function, backend="hpu_backend", fullgraph=True, dynamic=False)
        return compiled

    def run(self, launch: Callable[[], None]) -> None:
        """Ask for it, in lazy mode apart from what was asked for before: what is compiled is then the same always."""
        self._flush()
        launch()
        self._flush()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Record it. The graph keeps none of its inputs and results (disable_tensor_cache), which stay where they are.

        The package's `wrap_in_hpu_graph` keeps them for its callers, and would take memory for each bucket.
        """
        graph = self._hpu.HPUGraph()
        self.synchronize()
        with self._hpu.stream(self._hpu.Stream()):
            graph.capture_begin()
            try:
                launch()
            finally:
                graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    def _flush(self) -> None:
        if self._is_lazy:
            self._core.mark_step()
