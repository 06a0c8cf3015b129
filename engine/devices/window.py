"""A text that one sequence computes from its beginning, a piece at a time: for measurements, without a scheduler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .batch import SamplingBatch, StepBatch
from .limits import ExecutorLimits


class Window:
    """The tokens `[N] int32` of a text, and the KV blocks that they are computed in: the cache's first ones.

    Where a cache is smaller than the text, blocks behind a sliding window are used again.
    """

    def __init__(self, tokens: NDArray[np.int32], limits: ExecutorLimits) -> None:
        self.tokens = tokens
        blocks = np.arange(-(-len(tokens) // limits.block_size), dtype=np.int32)[None]
        self._tables = [blocks % group.num_blocks for group in limits.groups]
        self._has_state = bool(limits.num_states)

    def step(self, start: int, stop: int, sampling: SamplingBatch, rows: NDArray[np.int32]) -> StepBatch:
        """The step that computes tokens `[start, stop)` after those before, with the logits of `rows` among them."""
        return StepBatch(
            token_ids=self.tokens[start:stop],
            positions=np.arange(start, stop, dtype=np.int32),
            query_start=np.array([0, stop - start], np.int32),
            context_len=np.array([stop], np.int32),
            block_tables=self._tables[0],
            logits_rows=rows,
            sampling=sampling,
            window_tables=tuple(self._tables[1:]),
            state_slots=np.zeros(1, np.int32) if self._has_state else None,
        )
