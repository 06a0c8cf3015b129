"""Compiling and capturing every bucket before the device serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from ..bucketing import Bucket, BucketPlan
from .memory import MemoryPlan
from .options import GraphOptions

Phase = Literal["prompt", "decode"]


class Launches(Protocol):
    """What warm-up asks of the executor."""

    def free_memory(self) -> int:
        """Bytes of the device's memory that nobody has taken."""
        ...

    def run(self, phase: Phase, bucket: Bucket) -> None:
        """Compile the bucket's launch, and run it once on padding."""
        ...

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        """Keep the bucket's graph. It has been run."""
        ...


def warm_up(
    launches: Launches,
    plan: BucketPlan,
    memory: MemoryPlan | None,
    options: GraphOptions,
    progress: Callable[[int, int], None],
) -> None:
    """Run every bucket, the largest first, then capture them. `progress(done, all)` is called on the way."""
    if options.skip_warmup:
        return
    steps: list[tuple[Phase, Bucket]] = [("prompt", b) for b in (*plan.prompts, *plan.contexts)]
    steps += [("decode", b) for b in plan.decodes]
    steps.sort(key=lambda step: (step[1].num_tokens, step[1].width), reverse=True)
    actions = [launches.run] if options.enforce_eager else [launches.run, launches.capture]
    for i, action in enumerate(actions):
        for j, (phase, bucket) in enumerate(steps):
            action(phase, bucket)
            progress(i * len(steps) + j + 1, len(actions) * len(steps))
