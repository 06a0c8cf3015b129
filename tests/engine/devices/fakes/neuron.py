"""torch-neuronx as AWS's documentation describes it, for one device.

https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/compile/reference-torch-compile.html: the backend is
called neuron and has static shapes only. What is not within a compiled function is compiled operation by operation.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from engine.devices.fakes.accelerator import GIB, Accelerator


class FakeNeuron:
    """What replaces torch_neuronx and torch.accelerator."""

    def __init__(self, total_bytes: int = GIB) -> None:
        # What torch calls the device before torch_neuronx names it, which nothing could undo in this process.
        self.accelerator = Accelerator("privateuseone", total_bytes, compiles_operations=True)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeNeuron:
        """Make `import torch_neuronx` find this."""
        accelerator = self.accelerator

        def compile_function(function: Any, *, backend: str, fullgraph: bool, dynamic: bool) -> Any:
            assert (backend, fullgraph, dynamic) == ("neuron", True, False)
            return accelerator.compiled_function(function)

        def synchronize(device: object = None) -> None:
            accelerator.synchronized += 1

        monkeypatch.setitem(sys.modules, "torch_neuronx", ModuleType("torch_neuronx"))
        monkeypatch.setattr(torch, "compile", compile_function)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: accelerator.enter())
        monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device=None: accelerator.memory)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator.device)
        return self
