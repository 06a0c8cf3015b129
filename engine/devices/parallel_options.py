"""The options of devices that can share a model among several accelerators."""

from __future__ import annotations

from dataclasses import dataclass

from ..declaring.option import Options, option
from ..declaring.values import at_least, count


@dataclass(frozen=True)
class ParallelOptions(Options):
    """How many accelerators of this machine hold a part of each layer (https://arxiv.org/abs/1909.08053)."""

    tensor_parallel_size: int = option(
        1, "accelerators that share a model", parse=count, check=at_least(1), metavar="N"
    )
