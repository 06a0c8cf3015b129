"""How several Gaudi cards add up. Importing this makes Intel's library known to torch.distributed as "hccl".

https://docs.habana.ai/en/latest/PyTorch/PyTorch_Scaling_Guide/Distributed_Backend_Initialization.html
"""

from __future__ import annotations

from collections.abc import Callable

import habana_frameworks.torch.core as htcore
import habana_frameworks.torch.distributed.hccl  # noqa: F401
from torch import Tensor, distributed

from .hpu_options import is_lazy


def make_adder() -> Callable[[Tensor], Tensor]:
    """A function that gives the sum of all processes' tensors, in the mode that the package runs in."""
    flush = htcore.mark_step if is_lazy() else None

    def add_up(x: Tensor) -> Tensor:
        if flush is not None:
            flush()  # Intel's bridge has had bugs where a collective is asked for together with what is before it
        distributed.all_reduce(x)
        return x

    return add_up
