"""AWS Trainium, through TorchNeuron (torch-neuronx): a graph for each shape, and none that is replayed.

https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/about-pytorch-neuron.html
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
from .operations import Operations
from .options import GraphOptions
from .searching import keep_by_search


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
    # Compilers for Neuron fail at sorts (https://github.com/aws-neuron/aws-neuron-sdk/issues/868), and at the top-k of
    # whole vocabularies, which is an instruction for narrow rows.
    operations = Operations(keep=keep_by_search)

    def __init__(self, options: GraphOptions) -> None:
        try:
            import torch_neuronx  # noqa: F401  (makes the device known to torch)
        except ModuleNotFoundError as error:
            raise DeviceError(
                f"{error.name} is not installed: use the image of Dockerfile.neuron. AWS's images for vLLM have "
                "libtorch-neuronx-lite instead, which is not enough"
            ) from error
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            raise DeviceError(
                "torch-neuronx finds no device: see that neuron-ls lists one (docker run --device=/dev/neuron0) of "
                "Trn2 or Trn3, that NEURON_RT_VISIBLE_CORES does not hide it, and that torch-neuronx is 2.13 or newer: "
                "Trn1 and Inf2 have an older one, for torch-xla"
            )
        # Of several processes that share a model, each has one core, with a number of its own.
        self.device = torch.device(found.type, torch.accelerator.current_device_index())
        self._is_eager = options.enforce_eager

    def enter(self) -> None:
        """Make it the thread's device."""
        torch.accelerator.set_device_index(self.device)

    def memory(self) -> DeviceMemory:
        """The runtime's memory. It counts only finished work, so this waits for all work first."""
        self.synchronize()
        return DeviceMemory(*torch.accelerator.get_memory_info(self.device))

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
