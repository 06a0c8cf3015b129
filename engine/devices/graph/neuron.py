"""AWS Trainium, through torch-neuronx: a graph for each shape, and none that is replayed.

https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/compile/reference-torch-compile.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import DeviceError
from ...weights.dtypes import DType
from .adapter import DeviceMemory
from .attention import gather_attention, no_plan
from .options import GraphOptions


class NeuronAdapter:
    """One logical NeuronCore. Raises DeviceError if AWS's package is missing or finds none."""

    name = "neuron"
    dtypes: tuple[DType, ...] = ("bfloat16", "float16")
    block_size = 32
    chunked_prefill = True
    max_prefill_seqs: int | None = 1
    captures = False
    compiles_only_layers = False
    has_float64 = False
    attend = staticmethod(gather_attention)
    plan_attention = staticmethod(no_plan)
    any_width = False

    def __init__(self, options: GraphOptions) -> None:
        try:
            import torch_neuronx  # noqa: F401  (makes the device known to torch)
        except ModuleNotFoundError as error:
            raise DeviceError(
                f"{error.name} is not installed: use the image of Dockerfile.neuron, whose base has AWS's packages"
            ) from error
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            raise DeviceError(
                "torch-neuronx finds no device: see that neuron-ls lists one (docker run --device=/dev/neuron0) and "
                "that NEURON_RT_VISIBLE_CORES does not hide it"
            )
        self.device = torch.device(found.type, 0)
        self._is_eager = options.enforce_eager

    def enter(self) -> None:
        """Make it the thread's device."""
        torch.accelerator.set_device_index(0)

    def memory(self) -> DeviceMemory:
        """The runtime's memory. It counts only finished work, so this waits for all work first."""
        self.synchronize()
        return DeviceMemory(*torch.accelerator.get_memory_info(0))

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.accelerator.synchronize()

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one graph of the device (NEFF), or operation by operation, each compiled too."""
        if self._is_eager:
            return function
        compiled: Callable[..., Any] = torch.compile(function, backend="neuron", fullgraph=True, dynamic=False)
        return compiled

    def run(self, launch: Callable[[], None]) -> None:
        """Ask for it."""
        launch()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """The launch itself: compiled graphs are all that the device has."""
        return launch
