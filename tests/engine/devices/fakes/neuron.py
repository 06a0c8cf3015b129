"""TorchNeuron (torch-neuronx) as AWS describes it, for one logical core. The rules, and where they are from:

- The backend is called neuron, has static shapes only, and compiles each shape once. What is not within a compiled
  function is compiled operation by operation.
  https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/compile/reference-torch-compile.html
- A compiled function takes no tensors of the CPU (TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY), and what does not compile
  is an error (TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION).
  https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/reference/env-vars.html
- float64 is computed in float32, so asking for it is an error here. 64-bit integers are 32-bit ones on the device.
  https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/reference/guidelines-memory-management.html
- Sorts do not compile (https://github.com/aws-neuron/aws-neuron-sdk/issues/868). A top-k is of the last dimension, of
  the largest values, of floats, and not of a whole vocabulary: TopKXLAImpl in the package's python_ops.
- The device is registered as PrivateUse1, whose hooks need not have pinned memory.
  https://docs.pytorch.org/tutorials/advanced/privateuseone.html
- Memory is counted when the device is done: synchronize first.
  https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/guides/memory-profiling-guide.html
- A process that shares a model sees one core, and has not used it before its group is made. The group is one in Python,
  so that it has no other library for tensors of the CPU.
  https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/guides/torch-distributed.html
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from engine.devices.fakes.accelerator import GIB, Accelerator
from torch import Tensor
from torch.distributed import _functional_collectives

aten = torch.ops.aten
_SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable, aten.msort.default)
_WIDEST_TOP_K = 16384  # float32 values of a row; wider ones fail in the compiler from k = 16 on


class FakeNeuron:
    """What replaces torch_neuronx and torch.accelerator."""

    def __init__(self, total_bytes: int = GIB) -> None:
        # What torch calls the device before torch_neuronx names it, which nothing could undo in this process.
        self.accelerator = Accelerator(
            "privateuseone", total_bytes, compiles_operations=True, pins_memory=False, refuses=_refuses
        )
        self._is_used = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeNeuron:
        """Make `import torch_neuronx` find this."""
        accelerator = self.accelerator

        def compile_function(function: Any, *, backend: str, fullgraph: bool, dynamic: bool) -> Any:
            assert (backend, fullgraph, dynamic) == ("neuron", True, False)
            assert os.environ.get("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "1") == "1"
            return accelerator.compiled_function(function)

        def synchronize(device: object = None) -> None:
            accelerator.synchronized += 1

        def enter(device: object) -> None:
            self._is_used = True
            accelerator.enter()

        package = ModuleType("torch_neuronx")
        vars(package)["is_neuron_runtime_initialized"] = lambda: self._is_used
        monkeypatch.setitem(sys.modules, "torch_neuronx", package)
        monkeypatch.setattr(torch, "compile", compile_function)
        monkeypatch.setattr(torch.accelerator, "set_device_index", enter)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: accelerator.device.index)
        monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device=None: accelerator.memory)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator.device)
        if "LOCAL_WORLD_SIZE" in os.environ:
            self.share(monkeypatch)
        return self

    def share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the group of processes that torch.distributed knows as "neuron", with gloo in it."""
        from engine.devices.fakes import neuron_group

        neuron_group.register()
        monkeypatch.setattr(
            _functional_collectives, "all_reduce", lambda x, op, group: torch.ops.fake_neuron.all_reduce(x)
        )


def _refuses(func: Any, operands: Sequence[Tensor], compiled: bool) -> str | None:
    if any(operand.dtype == torch.float64 for operand in operands):
        return "float64 is computed in float32"
    if func in _SORTS:
        return "sorts do not compile"
    if func is aten.topk.default and (operands[0].shape[-1] > _WIDEST_TOP_K or not operands[0].is_floating_point()):
        return "such a top-k does not compile"
    return None
