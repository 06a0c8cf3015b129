"""ModelDrafter: a small model drafts what the large one will sample.

It shares the large one's block tables: each token has a place for the K and V of both models. Before the small model
drafts, it computes the tokens of a sequence that it does not know yet, a part in each step. So prompts cost it nothing
as long as draft tokens do not pay. See https://arxiv.org/abs/2302.01318.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from ..cache.identity import Digest
from ..constraints.filters import mask_words
from ..devices.batch import SamplingBatch, StepBatch, TokenMasks
from ..devices.executor import DraftExecutor
from ..sequences.sequence import UNKNOWN, Sequence
from .draft_costs import DraftCosts, StepPrices
from .draft_rows import DraftRows, first_tables

_SHORT_BACKLOG = 4  # tokens that are new to the small model; a draft that was right leaves two
_MIN_PAUSE_MS = 2.0  # by which even a short step may be delayed: nobody sees that
_FIRST_LENGTH = 256.0  # tokens of an answer, before any has ended
_LENGTH_WEIGHT = 0.1


class ModelDrafter:
    """Drafts at most `num_tokens` tokens for each sequence, for all sequences in one call of the executor."""

    def __init__(
        self,
        executor: DraftExecutor,
        num_tokens: int,
        *,
        vocab_size: int,
        own_vocab_size: int,
        max_context: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """It drafts nothing behind `max_context` tokens.

        `vocab_size` is the large model's, `own_vocab_size` the small one's. They may differ in ids that no token has.
        `clock` gives seconds.
        """
        self._clock = clock
        self._executor = executor
        self.num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._own_vocab_size = own_vocab_size
        self._max_context = max_context
        self._block_size = executor.limits.block_size
        self._max_tokens = executor.limits.max_num_batched_tokens
        self._contents: list[Digest | None] = [None] * executor.limits.num_blocks  # full blocks that it has computed
        self.costs = DraftCosts()
        self._rows = DraftRows()
        self._behind: dict[Sequence, int] = {}  # how many tokens to compute of those that get no draft yet
        self._answer_length = _FIRST_LENGTH

    def rooms(self, sequences: Seq[Sequence]) -> dict[Sequence, int]:
        """See BatchDrafter."""
        return {s: room for s in sequences if (room := self._room(s)) > 0}

    def ready(
        self, counts: Mapping[Sequence, int], saved_ms: float, num_accepted: float, prices: StepPrices
    ) -> dict[Sequence, int]:
        """Those that the small model can know up to the last token in this step; it catches up with one more."""
        self._behind.clear()
        spare_ms = max(min(prices.max_ms - prices.plain_ms, max(prices.plain_ms, _MIN_PAUSE_MS)), 0.0)
        left = min(self.costs.num_tokens(spare_ms), self._max_tokens)
        room = self._max_tokens
        ready: dict[Sequence, int] = {}
        for sequence, count in counts.items():
            if sequence.num_drafted == UNKNOWN:
                self._look_up(sequence)
            backlog = sequence.num_tokens - sequence.num_drafted
            if backlog > _SHORT_BACKLOG:
                # Answers end at any moment alike.
                steps = min(sequence.max_length - sequence.num_tokens, self._answer_length) / (1.0 + num_accepted)
                if self.costs.tokens_ms(backlog) > saved_ms * steps:
                    continue
                if backlog > left:
                    if (part := min(left, room)) > 0:
                        self._behind[sequence] = part
                        left, room = 0, room - part
                    continue
                left -= backlog
            if backlog <= room:
                ready[sequence] = count
                room -= backlog
        return ready

    def draft(
        self, counts: Mapping[Sequence, int], prices: StepPrices, masks: TokenMasks | None = None
    ) -> tuple[dict[Sequence, list[int]], float]:
        """Draft tokens for sequences of the plan, which have blocks for them, and the milliseconds they took."""
        running = {s: s.num_tokens - s.num_drafted for s in counts}
        running |= self._behind
        if not running:
            return {}, 0.0
        batch = self._batch(running, counts)
        batch.sampling.masks = None if masks is None else self._own_masks(masks)
        wanted = np.array([*counts.values()] + [0] * len(self._behind), np.int32)
        least = self.costs.min_probability(len(counts), prices)
        started = self._clock()
        draft_tokens = self._executor.draft(batch, wanted, least)
        elapsed_ms = (self._clock() - started) * 1e3
        made, drafted = [], {}
        for (sequence, num_tokens), row in zip(running.items(), draft_tokens.tolist(), strict=True):
            if -1 in row:
                del row[row.index(-1) :]
            made.append(len(row))
            self._note(sequence, num_tokens, len(row))
            if sequence in counts:
                if self._own_vocab_size > self._vocab_size:
                    row = row[: next((i for i, token in enumerate(row) if token >= self._vocab_size), len(row))]
                drafted[sequence] = row
        self.costs.observe(made, len(batch.token_ids) - len(counts), elapsed_ms)
        return drafted, elapsed_ms

    def learn(self, sequence: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        """Accepted draft tokens are computed, except the last one."""
        sequence.num_drafted += min(num_accepted, num_draft_tokens - 1)

    def ended(self, sequence: Sequence) -> None:
        """Learn how long answers are."""
        length = sequence.num_tokens - sequence.prompt_len
        self._answer_length += _LENGTH_WEIGHT * (length - self._answer_length)

    def lose_cache(self) -> None:
        """Know that no block has anything of the small model any more."""
        self._contents = [None] * len(self._contents)

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy what the small model has in blocks, `(from, to)`."""
        self._executor.copy_blocks(np.array(pairs, np.int32))
        for _, to in pairs:
            self._contents[to] = None

    def _room(self, sequence: Sequence) -> int:
        """The most draft tokens of a sequence: the last token before its end is sampled without one."""
        longest = min(sequence.max_length - 1, self._max_context)
        return min(self.num_tokens, longest - sequence.num_tokens)

    def _look_up(self, sequence: Sequence) -> None:
        """Find out how much of a sequence it has computed for others, in the blocks that they share."""
        digests = sequence.digests(sequence.num_registered, self._block_size)
        table = sequence.block_tables[0]
        known = next((i for i, digest in enumerate(digests) if self._contents[table[i]] != digest), len(digests))
        sequence.num_drafted = known * self._block_size

    def _note(self, sequence: Sequence, num_tokens: int, num_draft_tokens: int) -> None:
        """Note that `num_tokens` tokens of a sequence were computed, and draft tokens behind them."""
        start, size, table = sequence.num_drafted, self._block_size, sequence.block_tables[0]
        end = sequence.num_drafted = start + num_tokens
        for block in table[start // size : (end + num_draft_tokens - 1) // size + 1].tolist():
            self._contents[block] = None
        # The prefix cache may have heard of blocks that were full before.
        first, full = max(start - self.num_tokens - 1, 0) // size, min(end // size, sequence.num_registered)
        if first < full:
            digests = sequence.digests(full, size)
            for i in range(first, full):
                self._contents[table[i]] = digests[i]

    def _batch(self, running: Mapping[Sequence, int], counts: Mapping[Sequence, int]) -> StepBatch:
        """The next tokens of each sequence, and the row after the last one of each that is in `counts`."""
        token_ids, positions, starts, ends = [], [], [0], []
        for sequence, length in running.items():
            start = sequence.num_drafted
            end = start + length
            token_ids.append(sequence.tokens[start:end])
            positions.append(np.arange(start, end, dtype=np.int32))
            starts.append(starts[-1] + length)
            ends.append(end)
        known = token_ids[0] if len(token_ids) == 1 else np.concatenate(token_ids)
        if self._own_vocab_size < self._vocab_size:
            known = np.minimum(known, self._own_vocab_size - 1)
        query_start, context_len = np.array(starts, np.int32), np.array(ends, np.int32)
        return StepBatch(
            token_ids=known,
            positions=positions[0] if len(positions) == 1 else np.concatenate(positions),
            query_start=query_start,
            context_len=context_len,
            block_tables=first_tables([*running]),
            logits_rows=query_start[1 : len(counts) + 1] - 1,
            sampling=self._sampling([*counts], context_len[: len(counts)]),
        )

    def _own_masks(self, masks: TokenMasks) -> TokenMasks:
        """Masks of the small model's ids. It may have more ids than the large one; these are no tokens."""
        missing = mask_words(self._own_vocab_size) - masks.bits.shape[1]
        if missing <= 0:
            return masks
        return TokenMasks(np.pad(masks.bits, ((0, 0), (0, missing))), masks.index)

    def _sampling(self, sequences: list[Sequence], positions: NDArray[np.int32]) -> SamplingBatch:
        sampling = self._rows.sampling(sequences, positions)
        if self._own_vocab_size >= self._vocab_size:
            return sampling
        sampling.history_ids = np.minimum(sampling.history_ids, self._own_vocab_size - 1)
        if (sampling.bias_ids >= self._own_vocab_size).any():
            sampling.bias_start = np.zeros(len(sequences) + 1, np.int32)
            sampling.bias_ids, sampling.bias_values = np.empty(0, np.int32), np.empty(0, np.float32)
        return sampling
