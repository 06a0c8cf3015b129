"""MtpDrafter: an additional layer drafts what the model will sample: the model's MTP layer, or an EAGLE3 layer.

The layer reads what the model's steps left, so it has nothing to catch up with. Its K and V lie in the model's blocks,
and each step writes them. See https://arxiv.org/abs/2412.19437, 2.2, and https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from ..devices.batch import StepBatch, TokenMasks
from ..devices.executor import DraftExecutor
from ..media.prompt_media import positions_behind
from ..sequences.sequence import Sequence
from .draft_costs import DraftCosts, StepPrices
from .draft_rows import DraftRows, first_tables


class MtpDrafter:
    """Drafts at most `num_tokens` tokens for each sequence, for all sequences in one call of the model's executor."""

    def __init__(
        self,
        executor: DraftExecutor,
        num_tokens: int,
        *,
        max_context: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Nothing is drafted behind `max_context` tokens. `clock` gives seconds."""
        self._executor = executor
        self.num_tokens = num_tokens
        self._max_context = max_context
        self._max_sequences = executor.limits.max_num_seqs
        self._has_adapters = executor.limits.max_loras > 0
        self._clock = clock
        self.costs = DraftCosts()
        self._rows = DraftRows()

    def rooms(self, sequences: Seq[Sequence]) -> dict[Sequence, int]:
        """See BatchDrafter."""
        return {s: room for s in sequences[: self._max_sequences] if (room := self._room(s)) > 0}

    def ready(
        self, counts: Mapping[Sequence, int], saved_ms: float, num_accepted: float, prices: StepPrices
    ) -> dict[Sequence, int]:
        """All of them: the layer reads what the model's steps left."""
        return dict(counts)

    def draft(
        self, counts: Mapping[Sequence, int], prices: StepPrices, masks: TokenMasks | None = None
    ) -> tuple[dict[Sequence, list[int]], float]:
        """Draft tokens for sequences of the plan, which have blocks for them, and the milliseconds they took."""
        if not counts:
            return {}, 0.0
        sequences = [*counts]
        batch = self._batch(sequences)
        batch.sampling.masks = masks
        least = self.costs.min_probability(len(sequences), prices)
        started = self._clock()
        draft_tokens = self._executor.draft(batch, np.array([*counts.values()], np.int32), least)
        elapsed_ms = (self._clock() - started) * 1e3
        drafted = {}
        for sequence, row in zip(sequences, draft_tokens.tolist(), strict=True):
            if -1 in row:
                del row[row.index(-1) :]
            drafted[sequence] = row
        self.costs.observe([len(row) for row in drafted.values()], 0, elapsed_ms)
        return drafted, elapsed_ms

    def learn(self, sequence: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        """Nothing: the next step overwrites what was rejected."""

    def ended(self, sequence: Sequence) -> None:
        """Nothing is known of a sequence."""

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy KV blocks now, which the next step will copy too: draft tokens are made before it."""
        self._executor.copy_blocks(np.array(pairs, np.int32))

    def _room(self, sequence: Sequence) -> int:
        """The most draft tokens of a sequence: the last token before its end is sampled without one."""
        longest = min(sequence.max_length - 1, self._max_context)
        return min(self.num_tokens, longest - sequence.num_tokens)

    def _batch(self, sequences: list[Sequence]) -> StepBatch:
        """The last token of each sequence, and the row after it."""
        context_len = np.array([s.num_tokens for s in sequences], np.int32)
        starts = np.arange(len(sequences) + 1, dtype=np.int32)
        positions = context_len - 1
        has_adapters = self._has_adapters and any(s.adapter >= 0 for s in sequences)
        return StepBatch(
            token_ids=np.array([s.last_token for s in sequences], np.int32),
            positions=positions,
            query_start=starts,
            context_len=context_len,
            block_tables=first_tables(sequences),
            logits_rows=starts[:-1],
            sampling=self._rows.sampling(sequences, context_len),
            adapters=np.array([s.adapter for s in sequences], np.int32) if has_adapters else None,
            rope_positions=positions_behind([s.media for s in sequences], positions),
        )
