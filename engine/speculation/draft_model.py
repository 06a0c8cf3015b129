"""ModelDrafter: a small model guesses what the large one will sample.

It shares the large one's block tables: wherever that has K and V of a token, the small one has a place for its own.
What it does not know of a sequence, it computes before it guesses, a part in each step. So prompts cost it nothing as
long as guesses do not pay. See https://arxiv.org/abs/2302.01318.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from ..cache.identity import Digest
from ..devices.base import DraftExecutor
from ..devices.batch import SamplingBatch, StepBatch
from ..scheduling.drafter import Draftable, StepPrices
from ..scheduling.sampling_rows import sampling_batch
from ..scheduling.sequence import UNKNOWN, Sequence
from .draft_costs import DraftCosts

_SHORT_BACKLOG = 4  # tokens that are new to the small model; a draft that was right leaves two
_LARGEST_INVESTMENT = 0.3  # of the time that the rest of a sequence takes without guesses
_TRIAL_STEPS = 256  # without a guess, after which one is made to see what it costs by now


class ModelDrafter:
    """Proposes at most `num_tokens` for each sequence, of all sequences in one call of the executor."""

    def __init__(
        self,
        executor: DraftExecutor,
        num_tokens: int,
        *,
        vocab_size: int,
        own_vocab_size: int,
        most_context: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """It has no idea of what follows `most_context` tokens.

        `vocab_size` is the large model's, `own_vocab_size` the small one's. They may differ in ids that no token has.
        `clock` gives seconds.
        """
        self._clock = clock
        self._executor = executor
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._own_vocab_size = own_vocab_size
        self._most_context = most_context
        self._block_size = executor.limits.block_size
        self._most_tokens = executor.limits.max_num_batched_tokens
        self._contents: list[Digest | None] = [None] * executor.limits.num_blocks  # full blocks that it has computed
        self._costs = DraftCosts()
        self._behind: dict[Sequence, int] = {}  # who gets no guess yet, and the tokens to be computed of each
        self._guesses: dict[int, list[int]] = {}  # by Sequence.key
        self._steps_without = 0

    def propose(self, sequence: Draftable) -> list[int]:
        """What was guessed for this step."""
        return self._guesses.get(sequence.key, [])

    def plan(self, rates: Mapping[Sequence, float], prices: StepPrices) -> dict[Sequence, int]:
        """How many guesses each of these sequences is to get, of which `rates` are right; some get none."""
        self._guesses, self._behind = {}, {}
        known = {s: (rate, room) for s, rate in rates.items() if (room := self._room(s)) > 0}
        counts = self._costs.counts(known, prices)
        self._steps_without = 0 if counts else self._steps_without + 1
        if self._steps_without >= _TRIAL_STEPS and known and max(rates.values()) > prices.row_share:
            counts, self._steps_without = {max(known, key=rates.__getitem__): 1}, 0
        return self._caught_up(counts, prices) if counts else counts

    def guess(self, counts: Mapping[Sequence, int], prices: StepPrices) -> None:
        """Guess for sequences of the plan. They have blocks for their guesses. Takes note of how long that takes."""
        running = {**{s: s.num_tokens - s.num_drafted for s in counts}, **self._behind}
        if not running:
            return
        batch = self._batch(running, counts)
        wanted = np.array([counts.get(s, 0) for s in running], np.int32)
        started = self._clock()
        guesses = self._executor.guess(batch, wanted, self._costs.least_probability(len(counts), prices))
        elapsed_ms = (self._clock() - started) * 1e3
        made: list[int] = np.count_nonzero(guesses >= 0, axis=1).tolist()
        self._costs.observe(made, len(batch.token_ids) - len(counts), elapsed_ms)
        for (sequence, num_tokens), row, count in zip(running.items(), guesses.tolist(), made, strict=True):
            self._note(sequence, num_tokens, count)
            unknown = next((i for i in range(count) if row[i] >= self._vocab_size), count)
            self._guesses[sequence.key] = row[:unknown]

    def learn(self, sequence: Sequence, num_guesses: int, num_right: int) -> None:
        """Right guesses are computed, but for the last one."""
        sequence.num_drafted += min(num_right, num_guesses - 1)

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy what the small model has in blocks, `(from, to)`."""
        self._executor.copy_blocks(np.array(pairs, np.int32))
        for _, to in pairs:
            self._contents[to] = None

    def _room(self, sequence: Sequence) -> int:
        """The most guesses of a sequence: the token after them is sampled without one."""
        longest = min(sequence.max_length - 1, self._most_context)
        return min(self._num_tokens, longest - sequence.num_tokens)

    def _caught_up(self, counts: dict[Sequence, int], prices: StepPrices) -> dict[Sequence, int]:
        """Those of a plan that the small model can know up to the last token in this step."""
        left = min(self._costs.num_tokens(prices.spare_ms), self._most_tokens)
        room = self._most_tokens
        ready: dict[Sequence, int] = {}
        for sequence, count in counts.items():
            if sequence.num_drafted == UNKNOWN:
                self._look_up(sequence)
            backlog = sequence.num_tokens - sequence.num_drafted
            if backlog > _SHORT_BACKLOG:
                rest_ms = (sequence.max_length - sequence.num_tokens) * prices.plain_ms / prices.num_sequences
                if self._costs.tokens_ms(backlog) > _LARGEST_INVESTMENT * rest_ms:
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

    def _look_up(self, sequence: Sequence) -> None:
        """Find out how much of a sequence it has computed for others, in the blocks that they share."""
        digests = sequence.digests(sequence.num_registered, self._block_size)
        table = sequence.block_tables[0]
        known = next((i for i, digest in enumerate(digests) if self._contents[table[i]] != digest), len(digests))
        sequence.num_drafted = known * self._block_size

    def _note(self, sequence: Sequence, num_tokens: int, num_guesses: int) -> None:
        """So many tokens of a sequence were computed, and guesses behind them."""
        start, size, table = sequence.num_drafted, self._block_size, sequence.block_tables[0]
        end = sequence.num_drafted = start + num_tokens
        for block in table[start // size : (end + max(num_guesses - 1, 0) - 1) // size + 1].tolist():
            self._contents[block] = None
        # The prefix cache may have heard of blocks that were full before.
        first, full = max(start - self._num_tokens - 1, 0) // size, min(end // size, sequence.num_registered)
        if first < full:
            digests = sequence.digests(full, size)
            for i in range(first, full):
                self._contents[table[i]] = digests[i]

    def _batch(self, running: Mapping[Sequence, int], counts: Mapping[Sequence, int]) -> StepBatch:
        """The next tokens of each sequence, and the row after the last one of each that is in `counts`."""
        lengths = np.fromiter(running.values(), np.int32, len(running))
        starts = np.zeros(len(running) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        ends = np.array([s.num_drafted for s in running], np.int32) + lengths
        spans = list(zip(running, ends.tolist(), lengths.tolist(), strict=True))
        tables = np.zeros((len(running), max(s.num_blocks for s in running)), np.int32)
        for table, sequence in zip(tables, running, strict=True):
            table[: sequence.num_blocks] = sequence.block_tables[0, : sequence.num_blocks]
        token_ids = np.concatenate([s.tokens[end - length : end] for s, end, length in spans])
        if self._own_vocab_size < self._vocab_size:
            token_ids = np.minimum(token_ids, self._own_vocab_size - 1)
        return StepBatch(
            token_ids=token_ids,
            positions=np.concatenate([np.arange(end - length, end, dtype=np.int32) for _, end, length in spans]),
            query_start=starts,
            context_len=ends,
            block_tables=tables,
            logits_rows=starts[1 : len(counts) + 1] - 1,
            sampling=self._sampling([*counts], ends[: len(counts)]),
        )

    def _sampling(self, sequences: Seq[Sequence], positions: NDArray[np.int32]) -> SamplingBatch:
        sampling = sampling_batch([s.sampling for s in sequences], positions)
        if self._own_vocab_size < self._vocab_size and (sampling.bias_ids >= self._own_vocab_size).any():
            sampling.bias_start = np.zeros(len(sequences) + 1, np.int32)
            sampling.bias_ids, sampling.bias_values = np.empty(0, np.int32), np.empty(0, np.float32)
        return sampling
