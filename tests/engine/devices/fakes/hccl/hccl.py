"""Intel's library of collectives, with gloo in its place. Importing it registers it, as Intel's documentation has it.

https://docs.habana.ai/en/latest/PyTorch/PyTorch_Scaling_Guide/Distributed_Backend_Initialization.html
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

_rank, _modules = int(os.environ["LOCAL_RANK"]), os.environ["HABANA_VISIBLE_MODULES"].split(",")
assert len(_modules) == int(os.environ["WORLD_SIZE"]), "there must be as many modules as processes"
assert os.environ["RANK"] == os.environ["LOCAL_RANK"], "all processes are on one machine"
assert os.environ["HLS_MODULE_ID"] == _modules[_rank], "each process has its own module"


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return distributed.ProcessGroupGloo(store, rank, size, timeout)


def _all_reduce(x: Tensor) -> Tensor:
    distributed.distributed_c10d._get_default_group()._get_backend(torch.device("hpu")).allreduce([x]).wait()
    return x


if not hasattr(distributed.Backend, "HCCL"):  # torch keeps what another test has registered
    distributed.Backend.register_backend("hccl", _make, devices=["hpu"])
    _library = torch.library.Library("fake_hccl", "DEF")
    _library.define("all_reduce(Tensor(a!) x) -> Tensor(a!)")
    _library.impl("all_reduce", _all_reduce, "CPU")
