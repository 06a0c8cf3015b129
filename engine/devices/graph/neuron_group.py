"""How several Neuron cores add up. Importing this makes AWS's library known to torch.distributed as "neuron".

https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/guides/torch-distributed.html
"""

from __future__ import annotations

from collections.abc import Callable

import torch_neuronx
from torch import Tensor, distributed
from torch.distributed import _functional_collectives

from ...errors import DeviceError


def make_adder() -> Callable[[Tensor], Tensor]:
    """A function that gives the sum of all processes' tensors, also within a compiled function.

    The sum is a tensor of its own: a compiled function may write in place only to what it was given. Raises DeviceError
    if this process has used a core already: the runtime would have to be started again.
    """
    if torch_neuronx.is_neuron_runtime_initialized():
        raise DeviceError(
            "this server has used a Neuron core before: only the first model that it loads may be shared by several "
            "cores. Start a server for each model"
        )

    def add_up(x: Tensor) -> Tensor:
        group = distributed.group.WORLD
        assert group is not None
        total: Tensor = _functional_collectives.all_reduce(x, "sum", group.group_name)
        return total

    return add_up
