"""The options of devices that can share a model among several parts of a machine."""

from __future__ import annotations

from ..declaring.option import Options, option
from ..declaring.record import record
from ..declaring.values import at_least, count


@record(frozen=True)
class ParallelOptions(Options):
    """How many accelerators, or groups of cores, hold a part of each layer (https://arxiv.org/abs/1909.08053)."""

    tensor_parallel_size: int = option(
        1,
        "number of accelerators that share a model, or on the CPU, number of groups of cores (in each stage of a "
        "pipeline)",
        parse=count,
        check=at_least(1),
        metavar="N",
    )
