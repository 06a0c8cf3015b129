"""Compiling and capturing every bucket before the device serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from ..bucketing import Bucket, BucketPlan
from .buckets import listed
from .memory import GraphBudget, MemoryPlan, capture_order, in_words, work
from .options import CaptureStrategy, GraphOptions

Phase = Literal["prompt", "decode"]

logger = logging.getLogger(__name__)


class Launches(Protocol):
    """What warm-up asks of the executor."""

    def free_memory(self) -> int:
        """Free bytes of the device's memory."""
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
    *,
    captures: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run every bucket, the largest first, then capture what `memory` has room for; without a plan, everything.

    `captures` says whether the device has graphs, `clock` gives seconds. `progress(done, all)` is called on the way.
    """
    captures = captures and options.captures
    for said in options.without_effect(captures=captures, budgeted=memory is not None):
        logger.warning("%s", said)
    if options.skip_warmup:
        logger.warning("No warm-up (VLLM_SKIP_WARMUP): each size is compiled when the first step needs it")
        return
    started, free = clock(), launches.free_memory()
    _WarmUp(launches, plan, memory, options, progress, captures).run()
    allocated = in_words(free - launches.free_memory())
    logger.info("Warmup finished in %.0f secs, allocated %s of device memory", clock() - started, allocated)


class _Group:
    """Buckets that are warmed up together: those to capture in `order`, and what was captured with `used` bytes."""

    def __init__(self, name: str, phase: Phase, buckets: Sequence[Bucket], order: Sequence[Bucket]) -> None:
        self.name = name
        self.phase: Phase = phase
        self.buckets = buckets
        self.order = order
        self.captured: set[Bucket] = set()
        self.used = 0

    @property
    def is_complete(self) -> bool:
        return len(self.captured) == len(self.order)


class _WarmUp:
    def __init__(
        self,
        launches: Launches,
        plan: BucketPlan,
        memory: MemoryPlan | None,
        options: GraphOptions,
        progress: Callable[[int, int], None],
        captures: bool,
    ) -> None:
        self._launches, self._plan, self._memory, self._options = launches, plan, memory, options
        self._progress = progress
        self._captures = captures

        def group(name: str, phase: Phase, buckets: Sequence[Bucket], strategy: CaptureStrategy) -> _Group:
            return _Group(name, phase, buckets, capture_order(filter(self._is_captured, buckets), strategy))

        self._prompts = group("Prompt", "prompt", plan.prompts, options.graph_prompt_strategy)
        self._decodes = group("Decode", "decode", plan.decodes, options.graph_decode_strategy)
        self._contexts = group("Context", "prompt", plan.contexts, options.graph_prompt_strategy)
        self._groups = (self._prompts, self._decodes, self._contexts)
        self._steps_left = sum(len(group.buckets) + len(group.order) for group in self._groups)
        self._steps = self._steps_left

    def run(self) -> None:
        """Compile everything, then capture."""
        for group in self._groups:
            largest_first = sorted(group.buckets, key=lambda b: (work(b), b.query_len, b.width, b), reverse=True)
            for i, bucket in enumerate(largest_first, 1):
                self._log(group, group.name, i, bucket, self._launches.free_memory())
                self._launches.run(group.phase, bucket)
                self._count(1)
        if self._captures:
            self._capture()

    def _is_captured(self, bucket: Bucket) -> bool:
        longest = self._options.max_seq_len_to_capture
        return self._captures and (longest is None or (bucket.width - 1) * self._plan.block_size < longest)

    def _capture(self) -> None:
        if too_long := sum(len(group.buckets) - len(group.order) for group in self._groups):
            longest = self._options.max_seq_len_to_capture
            logger.info("%d buckets get no graphs: they are longer than --max-seq-len-to-capture %d", too_long, longest)
        if self._memory is None:
            for group in self._groups:
                self._capture_group(group, None)
        else:
            self._capture_within(self._memory)
        for group in self._groups:
            if group.buckets:
                self._summarize(group)
        self._count(self._steps_left)  # those that memory has no room for

    def _capture_within(self, memory: MemoryPlan) -> None:
        """Each phase has its share. When one is complete, the other gets what it left; contexts get what is left."""
        free, ratio = self._launches.free_memory(), self._options.graph_prompt_ratio
        available = max(free - memory.margin, 0)
        prompts, decodes = GraphBudget(available * ratio), GraphBudget(available * (1 - ratio))
        logger.info(
            "Using %s/%s of free device memory for %s, %s for prompt and %s for decode (VLLM_GRAPH_PROMPT_RATIO=%g)",
            in_words(available),
            in_words(free),
            memory.graphs_name,
            in_words(prompts.left),
            in_words(decodes.left),
            ratio,
        )
        self._capture_group(self._prompts, prompts)
        self._capture_group(self._decodes, decodes)
        if self._decodes.is_complete:
            prompts.take(decodes)
            self._capture_group(self._prompts, prompts)
        elif self._prompts.is_complete:
            decodes.take(prompts)
            self._capture_group(self._decodes, decodes)
        prompts.take(decodes)
        self._capture_group(self._contexts, prompts)

    def _capture_group(self, group: _Group, budget: GraphBudget | None) -> None:
        for i, bucket in enumerate(group.order, 1):
            if bucket in group.captured or (budget is not None and not budget.allows(bucket)):
                continue
            free = self._launches.free_memory()
            self._log(group, f"Graph/{group.name}", i, bucket, free)
            self._launches.capture(group.phase, bucket)
            taken = free - self._launches.free_memory()
            group.captured.add(bucket)
            group.used += taken
            if budget is not None:
                budget.charge(bucket, taken)
            self._count(1)

    def _log(self, group: _Group, name: str, i: int, bucket: Bucket, free: int) -> None:
        dimensions = ("batch_size", "seq_len", "num_blocks")
        if group is self._decodes and self._plan.decode_unit == "block":
            dimensions = ("batch_size", "num_blocks", "")
        size = " ".join(f"{d}:{value}" for d, value in zip(dimensions, self._shown(group, bucket), strict=False))
        logger.info("[Warmup][%s][%d/%d] %s free_mem:%s", name, i, len(group.buckets), size, in_words(free))

    def _shown(self, group: _Group, bucket: Bucket) -> tuple[int, ...]:
        if group is self._decodes:
            return bucket.batch_size, self._plan.decode_size(bucket)
        return bucket[:2] if group is self._prompts else tuple(bucket)

    def _summarize(self, group: _Group) -> None:
        logger.info(
            "Graph/%s captured:%d (%.1f%%) used_mem:%s buckets:%s",
            group.name,
            len(group.captured),
            100 * len(group.captured) / len(group.buckets),
            in_words(group.used),
            listed([self._shown(group, bucket) for bucket in sorted(group.captured)]),
        )

    def _count(self, steps: int) -> None:
        self._steps_left -= steps
        self._progress(self._steps - self._steps_left, self._steps)
