"""The group of processes that TorchNeuron registers as "neuron", with gloo in its place."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

_DEVICE = "privateuseone"


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    assert os.environ["NEURON_RT_VISIBLE_CORES"].isdecimal(), "a process that shares a model has one core"
    assert os.environ["LOCAL_RANK"] == os.environ["RANK"] == str(rank), "all processes are on one machine"
    assert os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"] == str(size)
    return distributed.ProcessGroupGloo(store, rank, size, timeout)


def _all_reduce(x: Tensor) -> Tensor:
    total = x.clone()
    distributed.distributed_c10d._get_default_group()._get_backend(torch.device(_DEVICE)).allreduce([total]).wait()
    return total


def register() -> None:
    """Make it known to torch, which keeps it."""
    if hasattr(distributed.Backend, "NEURON"):
        return
    distributed.Backend.register_backend("neuron", _make, devices=[_DEVICE])
    library = torch.library.Library("fake_neuron", "DEF")
    library.define("all_reduce(Tensor x) -> Tensor")
    library.impl("all_reduce", _all_reduce, "CPU")
    _libraries.append(library)


_libraries: list[torch.library.Library] = []  # a library's operations go with it
