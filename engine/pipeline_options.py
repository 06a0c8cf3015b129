"""The options of pipelines: a model whose layers are shared out to several processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .declaring.option import Options, option
from .declaring.record import record
from .declaring.values import at_least, count


def _split(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def _above_zero(split: Sequence[int]) -> str | None:
    return None if split and all(layers > 0 for layers in split) else "must be numbers of layers above 0, like 10,12,10"


@record(frozen=True)
class PipelineOptions(Options):
    """How many stages there are, and how many layers each of them has. Raises OptionError."""

    pipeline_parallel_size: int = option(
        1,
        "number of processes that the model's layers are split between, on the CPU of this machine or of a Ray "
        "cluster's nodes",
        parse=count,
        check=at_least(1),
        metavar="N",
    )
    pipeline_split: Sequence[int] | None = option(
        None,
        "how many layers each of these processes has, e.g. 10,12,10 [by the size of their weights, and the speed and "
        "memory of each process]",
        parse=_split,
        check=_above_zero,
        metavar="LAYERS",
        env_aliases=("VLLM_PP_LAYER_PARTITION",),
    )

    @property
    def stages(self) -> int:
        """How many processes compute the model."""
        return self.pipeline_parallel_size

    def _contradictions(self) -> Iterator[str]:
        split = self.pipeline_split
        if split is not None and len(split) != self.stages:
            yield (
                f"--pipeline-split names {len(split)} stages, and --pipeline-parallel-size is {self.stages}: make "
                "them equal"
            )
