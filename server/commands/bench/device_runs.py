"""The device alone: steps of hand-made batches, timed without an engine around them.

Call these from a thread that stays the same and is not the main one: it computes too, and is pinned to a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tidewheel.engine.devices.batch import SamplingBatch, StepBatch
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorLimits

from .workload import Decode, Prefill

_WARM_UP_TOKENS = 64  # enough to wake the threads and to touch most of what a step uses
_COMPUTED_TOKENS = 8192  # of a context; a longer one repeats their K and V, to which attention takes as long


@runtime_checkable
class Profiler(Protocol):
    """Times a device's kernels."""

    def start_profile(self) -> None:
        """Forget what was recorded, and record from now on."""
        ...

    def profile(self) -> dict[str, tuple[int, float]]:
        """The calls and seconds of each kernel since then, in the order in which a step runs them."""
        ...

    def stop_profile(self) -> None:
        """Record no more."""
        ...


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """One run of a phase: its steps, their seconds, and of these each kernel's calls and seconds."""

    steps: int
    seconds: float
    kernels: dict[str, tuple[int, float]]


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The seconds of each repeat of a phase. `kernels` are from the median of as many more repeats with a profile."""

    seconds: list[float]
    kernels: KernelTimes | None


class DeviceRuns:
    """Runs prefills and decodes of random tokens. A sequence has the same blocks in all runs of one phase.

    Decodes that are repeated go on from the state that the last ones left, which takes as long as any other.
    """

    def __init__(self, executor: Executor, vocab_size: int, seed: int, profiler: Profiler | None = None) -> None:
        self._executor = executor
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)
        self._profiler = profiler
        self._num_steps = 0
        self._num_filled = 0  # tokens of sequence 0, which starts at block 0 in every phase, that have K and V

    def prefill(self, prefill: Prefill, repeats: int) -> PhaseTimes:
        """Computes the prompts in steps as full as the device allows."""
        tables = self._tables(prefill.prompts, prefill.tokens)
        warm_up = Prefill(prefill.prompts, min(prefill.tokens, max(_WARM_UP_TOKENS // prefill.prompts, 1)))
        self._time_prefill(warm_up, tables)
        self._num_filled = 0
        return self._times(lambda: self._time_prefill(prefill, tables), repeats)

    def decode(self, decode: Decode, num_tokens: int, repeats: int) -> PhaseTimes:
        """Decodes `num_tokens` of each sequence."""
        tables = self._tables(decode.batch_size, decode.context + num_tokens)
        self._fill(tables, decode.context)
        self._time_decode(decode, 1, tables)
        return self._times(lambda: self._time_decode(decode, num_tokens, tables), repeats)

    def _times(self, run: Callable[[], float], repeats: int) -> PhaseTimes:
        seconds = [run() for _ in range(repeats)]
        if self._profiler is None:
            return PhaseTimes(seconds, None)
        recorded = [self._recorded(self._profiler, run) for _ in range(repeats)]
        return PhaseTimes(seconds, sorted(recorded, key=lambda times: times.seconds)[repeats // 2])

    def _recorded(self, profiler: Profiler, run: Callable[[], float]) -> KernelTimes:
        steps_before = self._num_steps
        profiler.start_profile()
        seconds = run()
        kernels = profiler.profile()
        profiler.stop_profile()
        return KernelTimes(self._num_steps - steps_before, seconds, kernels)

    def _tables(self, num_sequences: int, num_tokens: int) -> list[NDArray[np.int32]]:
        """Each cache group's `[num_sequences, width]`. A sequence uses the blocks of a window again and again."""
        width = -(-num_tokens // self._executor.limits.block_size)
        tables = []
        for group in self._executor.limits.groups:
            own = width if group.window is None else min(width, group.num_blocks // num_sequences)
            first = np.arange(0, num_sequences * own, own, dtype=np.int32)
            tables.append(first[:, None] + np.arange(width, dtype=np.int32) % own)
        return tables

    def _fill(self, tables: list[NDArray[np.int32]], context: int) -> None:
        """K and V, and state, for `context` tokens of every sequence: computed once, then copied, so that each has its
        own. Of a long context only the first tokens are computed, and their blocks are copied to the others.

        What a shorter context left of sequence 0 is still there.
        """
        limits = self._executor.limits
        if not limits.chunked_prefill:
            self._num_filled = 0
        blocks = _COMPUTED_TOKENS // limits.block_size
        computed = min(context, blocks * limits.block_size)
        most = limits.max_num_batched_tokens if limits.chunked_prefill else max(computed, 1)
        for start in range(self._num_filled, computed, most):
            self._time_step(self._batch([(0, start, min(start + most, computed))], computed, tables))
        self._num_filled = computed
        for group, table in enumerate(tables):
            if computed < context and limits.groups[group].window is None:  # a window's blocks are used again
                later = np.arange(blocks, table.shape[1])
                self._executor.copy_blocks(np.stack([table[0, later % blocks], table[0, later]], axis=-1), group)
            if len(table) > 1:
                pairs = np.stack([np.broadcast_to(table[0], table[1:].shape), table[1:]], axis=-1)
                self._executor.copy_blocks(np.unique(pairs.reshape(-1, 2), axis=0), group)
        count = len(tables[0])
        if limits.num_states and count > 1:
            states = np.stack([np.zeros(count - 1, np.int32), np.arange(1, count, dtype=np.int32)], axis=-1)
            self._executor.copy_states(states)

    def _time_prefill(self, prefill: Prefill, tables: list[NDArray[np.int32]]) -> float:
        steps = _steps(prefill, self._executor.limits)
        return sum(self._time_step(self._batch(spans, prefill.tokens, tables)) for spans in steps)

    def _time_decode(self, decode: Decode, num_tokens: int, tables: list[NDArray[np.int32]]) -> float:
        context = decode.context
        batch = self._batch([(i, context, context + 1) for i in range(decode.batch_size)], context + 1, tables)
        total = 0.0
        for _ in range(num_tokens):
            total += self._time_step(batch)
            for positions in (batch.positions, batch.context_len, batch.sampling.position):
                positions += 1
        return total

    def _time_step(self, batch: StepBatch) -> float:
        self._num_steps += 1
        started = time.perf_counter()
        self._executor.start(batch).wait()
        return time.perf_counter() - started

    def _batch(self, spans: list[tuple[int, int, int]], prompt_len: int, tables: list[NDArray[np.int32]]) -> StepBatch:
        """A step of `(sequence, start, end)` spans; those that reach `prompt_len` get a next token."""
        ends = np.array([end for _, _, end in spans], dtype=np.int32)
        query_start = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum([end - start for _, start, end in spans], out=query_start[1:])
        complete = ends == prompt_len
        sequences = np.array([sequence for sequence, _, _ in spans], dtype=np.int32)
        rows = [np.ascontiguousarray(table[sequences]) for table in tables]
        return StepBatch(
            token_ids=self._random.integers(self._vocab_size, size=query_start[-1], dtype=np.int32),
            positions=np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in spans]),
            query_start=query_start,
            context_len=ends,
            block_tables=rows[0],
            logits_rows=query_start[1:][complete] - 1,
            sampling=SamplingBatch.greedy(ends[complete]),
            window_tables=tuple(rows[1:]),
            state_slots=sequences if self._executor.limits.num_states else None,
        )


def _steps(prefill: Prefill, limits: ExecutorLimits) -> Iterator[list[tuple[int, int, int]]]:
    """The prompts in order, in steps as full as the device allows: lists of `(sequence, start, end)`."""
    most = limits.max_num_batched_tokens
    spans: list[tuple[int, int, int]] = []
    room = most
    for sequence in range(prefill.prompts):
        start = 0
        while start < prefill.tokens:
            end = min(start + room, prefill.tokens) if limits.chunked_prefill else prefill.tokens
            if spans and (end - start > room or len(spans) == limits.max_prefill_seqs):
                yield spans
                spans, room = [], most
                continue
            spans.append((sequence, start, end))
            room -= end - start
            start = end
            if room <= 0:
                yield spans
                spans, room = [], most
    if spans:
        yield spans
