"""The device alone: steps of hand-made batches, timed without an engine around them.

Call these from a thread that stays the same and is not the main one: it computes too, and is pinned to a core.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tidewheel.engine.batch import SamplingBatch, StepBatch
from tidewheel.engine.devices.base import Executor
from tidewheel.server.bench.workload import Prefill

_WARM_UP_TOKENS = 64  # enough to wake the threads and to touch most of what a step uses


class DeviceRuns:
    """Runs prefills and decodes of random tokens. Sequence s owns the same blocks in every run."""

    def __init__(self, executor: Executor, vocab_size: int, seed: int) -> None:
        self._executor = executor
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def prefill(self, prefill: Prefill, repeats: int) -> list[float]:
        """The seconds that each of `repeats` took, in steps as full as the device allows."""
        tables = self._tables(prefill.prompts, prefill.tokens)
        warm_up = Prefill(prefill.prompts, min(prefill.tokens, max(_WARM_UP_TOKENS // prefill.prompts, 1)))
        self._time_prefill(warm_up, tables)
        return [self._time_prefill(prefill, tables) for _ in range(repeats)]

    def decode(self, batch_size: int, context: int, num_tokens: int, repeats: int) -> list[float]:
        """The seconds that `num_tokens` steps of `batch_size` sequences took, each with `context` tokens before."""
        tables = self._tables(batch_size, context + num_tokens)
        self._fill(tables, context)
        self._time_decode(batch_size, context, 1, tables)
        return [self._time_decode(batch_size, context, num_tokens, tables) for _ in range(repeats)]

    def _tables(self, num_sequences: int, num_tokens: int) -> NDArray[np.int32]:
        width = -(-num_tokens // self._executor.limits.block_size)
        return np.arange(num_sequences * width, dtype=np.int32).reshape(num_sequences, width)

    def _fill(self, tables: NDArray[np.int32], context: int) -> None:
        """K and V for `context` tokens of every sequence: computed once, then copied, so that each has its own."""
        self._time_prefill(Prefill(1, context), tables[:1])
        if len(tables) > 1:
            pairs = np.stack([np.broadcast_to(tables[0], tables[1:].shape), tables[1:]], axis=-1)
            self._executor.copy_blocks(pairs.reshape(-1, 2))

    def _time_prefill(self, prefill: Prefill, tables: NDArray[np.int32]) -> float:
        total = 0.0
        for spans in _steps(prefill, self._executor.limits.max_num_batched_tokens):
            batch = self._batch(spans, prefill.tokens, tables)
            started = time.perf_counter()
            self._executor.step(batch)
            total += time.perf_counter() - started
        return total

    def _time_decode(self, batch_size: int, context: int, num_tokens: int, tables: NDArray[np.int32]) -> float:
        spans = [(sequence, context, context + 1) for sequence in range(batch_size)]
        batch = self._batch(spans, context + 1, tables)
        total = 0.0
        for _ in range(num_tokens):
            started = time.perf_counter()
            self._executor.step(batch)
            total += time.perf_counter() - started
            for positions in (batch.positions, batch.context_len, batch.sampling.position):
                positions += 1
        return total

    def _batch(self, spans: list[tuple[int, int, int]], prompt_len: int, tables: NDArray[np.int32]) -> StepBatch:
        """A step of `(sequence, start, end)` spans; those that reach `prompt_len` get a next token."""
        ends = np.array([end for _, _, end in spans], dtype=np.int32)
        query_start = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum([end - start for _, start, end in spans], out=query_start[1:])
        complete = ends == prompt_len
        return StepBatch(
            token_ids=self._random.integers(self._vocab_size, size=query_start[-1], dtype=np.int32),
            positions=np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in spans]),
            query_start=query_start,
            context_len=ends,
            block_tables=np.ascontiguousarray(tables[[sequence for sequence, _, _ in spans]]),
            logits_rows=query_start[1:][complete] - 1,
            sampling=SamplingBatch.greedy(ends[complete]),
        )


def _steps(prefill: Prefill, max_tokens: int) -> Iterator[list[tuple[int, int, int]]]:
    """The prompts in order, in steps of `max_tokens`: lists of `(sequence, start, end)`."""
    spans: list[tuple[int, int, int]] = []
    room = max_tokens
    for sequence in range(prefill.prompts):
        start = 0
        while start < prefill.tokens:
            end = min(start + room, prefill.tokens)
            spans.append((sequence, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield spans
                spans, room = [], max_tokens
    if spans:
        yield spans
