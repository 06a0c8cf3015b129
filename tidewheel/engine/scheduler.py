"""Scheduler: which sequences run how many tokens in the next step, and what the step's tokens mean for them."""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from tidewheel.engine.blocks import BlockPool
from tidewheel.engine.cost_model import CostModel, StepLoad
from tidewheel.engine.devices.base import ExecutorLimits
from tidewheel.engine.request import FinishReason
from tidewheel.engine.sampling import NO_TOKEN
from tidewheel.engine.sequence import Sequence, SequenceState

_NO_TOKEN_ERROR = "the model gave no token that may be sampled: its logits are not finite, or all are forbidden"
_ALIGNED_BLOCKS = 4  # chunks of this many and more end where a block does
_STALE_ENTRIES = 64  # finished entries that the waiting heap may keep


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` tokens of a sequence in prefill. The one that reaches the last token samples a new one."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the sequence is computed up to its last token after this chunk."""
        return self.sequence.num_computed + self.num_tokens == self.sequence.num_tokens


@dataclass(slots=True)
class Step:
    """What runs next: one token of each of `decodes`, then the chunks.

    As long as `decode_version` stays the same, so do the decoding sequences, their order and their biases; `grown`
    are the rows of `decodes` that got a new block for this step.
    """

    decodes: list[Sequence] = field(default_factory=list)
    decode_version: int = 0
    grown: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    load: StepLoad = field(default_factory=StepLoad)

    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the step's rows."""
        if not self.chunks:
            return self.decodes
        return self.decodes + [chunk.sequence for chunk in self.chunks if chunk.is_last]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of the sequence `key`. `stop_reason` is the stop token that ended it, None for end of sequence.

    `is_complete`: its last token belongs to the text, after which its grammar allows no other.
    """

    key: int
    reason: FinishReason
    stop_reason: int | None = None
    error: str | None = None
    is_complete: bool = False


class Scheduler:
    """Continuous batching: decodes first, prompt chunks in what is left of the step's tokens and time.

    Order is by priority, then arrival. When blocks run out the last in that order is preempted: it gives up its
    blocks, keeps its tokens, and is computed again when there is room. The first in order can always go on, because
    no sequence is longer than the pool; so everything ends.
    """

    def __init__(
        self, pool: BlockPool, cost_model: CostModel, limits: ExecutorLimits, *, enable_prefix_caching: bool = True
    ) -> None:
        self.pool = pool
        self.cost_model = cost_model
        self.prompt_tokens_total = 0
        self.cached_prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self.preemptions_total = 0
        self._max_num_seqs = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._chunked_prefill = limits.chunked_prefill
        # Whole prompts may be too long to fit beside the decodes, so they get steps of their own.
        self._mixed_steps = limits.mixed_steps and limits.chunked_prefill
        self._prefix_caching = enable_prefix_caching
        self._sequences: dict[int, Sequence] = {}
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []  # a heap; finished ones are dropped when met
        self._prefilling: list[Sequence] = []  # in order
        self._decoding: list[Sequence] = []  # replaced, never changed in place: steps refer to it
        self._decode_version = 0
        self._prefilled_last = False
        self._num_constrained = 0

    @property
    def has_constraints(self) -> bool:
        """Whether any sequence has a constraint."""
        return self._num_constrained > 0

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run yet, or not any more for now."""
        return len(self._sequences) - self.num_running

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self._sequences)

    @property
    def unfinished(self) -> list[int]:
        """The keys of all sequences that have been added and have not ended."""
        return list(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._sequences[sequence.key] = sequence
        heapq.heappush(self._waiting, (sequence.order, sequence))
        self._num_constrained += sequence.constraint is not None
        if sequence.index == 0:
            self.prompt_tokens_total += sequence.prompt_len

    def abort(self, key: int) -> Finished | None:
        """End a sequence now and free its blocks; None if it has already ended."""
        sequence = self._sequences.get(key)
        return None if sequence is None else self._finish(sequence, FinishReason.ABORT)

    def schedule(self) -> Step | None:
        """Choose the next step; None when there is nothing to run."""
        step = Step()
        self._make_way()
        if self._mixed_steps:
            self._add_decodes(step)
            self._add_chunks(step)
        else:
            # Steps of one kind alternate, so that neither kind waits for the other to run dry.
            kinds = [self._add_chunks, self._add_decodes]
            for add in reversed(kinds) if self._prefilled_last else kinds:
                if not step.decodes and not step.chunks:
                    add(step)
            self._prefilled_last = bool(step.chunks)
        return step if step.decodes or step.chunks else None

    def commit(self, step: Step, token_ids: Seq[int]) -> list[Finished]:
        """Take in the sampled tokens, one for each decode and then each last chunk; return what has ended."""
        block_size = self.pool.block_size
        finished: list[Finished] = []
        row = 0
        for sequence in step.decodes:
            sequence.num_computed += 1
            if sequence.num_computed % block_size == 0:
                self._register_full_blocks(sequence)
            self._append(sequence, token_ids[row], finished)
            row += 1
        for chunk in step.chunks:
            sequence, is_last = chunk.sequence, chunk.is_last
            sequence.num_computed += chunk.num_tokens
            self._register_full_blocks(sequence)
            if is_last:
                self._start_decoding(sequence)
                self._append(sequence, token_ids[row], finished)
                row += 1
        self.generation_tokens_total += row
        return finished

    def check(self) -> None:
        """Raise AssertionError unless queues and blocks agree with each other."""
        running = self._prefilling + self._decoding
        waiting = [s for _, s in self._waiting if s.state is SequenceState.WAITING]
        assert sorted(s.key for s in running + waiting) == sorted(self._sequences)
        assert all(s.state is SequenceState.PREFILLING for s in self._prefilling)
        assert all(s.state is SequenceState.DECODING for s in self._decoding)
        assert all(s.num_computed == s.num_tokens - 1 for s in self._decoding)
        assert all(s.num_blocks == s.num_computed == 0 and not s.announced for s in waiting)
        assert all(s.num_computed <= s.num_blocks * self.pool.block_size for s in running)
        self.pool.check([s.blocks() for s in running])

    def _make_way(self) -> None:
        """Preempt running sequences of a lower priority than one that waits and could not run otherwise."""
        while (head := self._peek()) is not None and self.num_running:
            last = max(self._prefilling + self._decoding, key=_order)
            if last.priority <= head.priority or self._can_admit(head, self._cached_blocks(head)):
                return
            self._preempt(last)

    def _add_decodes(self, step: Step) -> None:
        """One token of every decoding sequence, each with room for it in a block."""
        block_size = self.pool.block_size
        short = [s for s in self._decoding if s.num_tokens > s.num_blocks * block_size]
        short.sort(key=_order)
        for sequence in short:
            while sequence.state is SequenceState.DECODING and self.pool.num_free == 0:
                self._preempt(max(self._prefilling + self._decoding, key=_order))
            if sequence.state is SequenceState.DECODING:
                sequence.add_blocks(self.pool.allocate(1))
        if short:
            step.grown = [row for row, sequence in enumerate(self._decoding) if sequence in short]
        step.decodes, step.decode_version = self._decoding, self._decode_version
        step.load = StepLoad(len(self._decoding), sum([s.num_tokens for s in self._decoding]))

    def _add_chunks(self, step: Step) -> None:
        """Fill the step with prompt tokens: of prompts already begun, then of new ones, in order."""
        if not self._prefilling and not self._waiting:
            return
        limit_ms = self.cost_model.limit_ms(step.load) if self._decoding else None
        for sequence in self._prefilling:
            if not self._add_chunk(step, sequence, limit_ms):
                return
        deferred: list[Sequence] = []
        while (sequence_or_none := self._peek()) is not None:
            sequence = sequence_or_none
            if self._should_await_prefix(sequence):
                deferred.append(self._pop())
                continue
            cached = self._cached_blocks(sequence)
            start = len(cached) * self.pool.block_size
            if not self._can_admit(sequence, cached) or self._chunk_size(step, sequence, start, limit_ms) == 0:
                break
            self._admit(self._pop(), cached)
            if not self._add_chunk(step, sequence, limit_ms):
                break
        for sequence in deferred:
            heapq.heappush(self._waiting, (sequence.order, sequence))

    def _add_chunk(self, step: Step, sequence: Sequence, limit_ms: float | None) -> bool:
        """Run what fits of a prompt; whether all of it did, so that the next one may come."""
        start = sequence.num_computed
        tokens = self._chunk_size(step, sequence, start, limit_ms)
        if tokens:
            step.chunks.append(Chunk(sequence, tokens))
            step.load = step.load.plus_chunk(start, tokens)
        return start + tokens == sequence.num_tokens

    def _chunk_size(self, step: Step, sequence: Sequence, start: int, limit_ms: float | None) -> int:
        """How many tokens from position `start` fit in the step; with `limit_ms`, also in that time."""
        left = sequence.num_tokens - start
        room = self._max_num_batched_tokens - step.load.num_tokens
        fitting = left if limit_ms is None else self.cost_model.chunk_tokens(step.load, start, limit_ms)
        if not self._chunked_prefill:
            return left if left <= room and (left <= fitting or not step.chunks) else 0
        block_size = self.pool.block_size
        if _ALIGNED_BLOCKS * block_size <= fitting < left:
            # Ending at a block's end makes the block available to others at once; a small chunk would lose too much.
            fitting = (start + fitting) // block_size * block_size - start
        return min(left, room, fitting)

    def _peek(self) -> Sequence | None:
        """The first waiting sequence in order."""
        while self._waiting and self._waiting[0][1].state is not SequenceState.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _pop(self) -> Sequence:
        return heapq.heappop(self._waiting)[1]

    def _reusable_blocks(self, sequence: Sequence) -> int:
        """Blocks that may come from the cache: at least one token must run, or there would be no logits."""
        return (sequence.num_tokens - 1) // self.pool.block_size if self._prefix_caching else 0

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        return self.pool.match(sequence.digests(self._reusable_blocks(sequence), self.pool.block_size))

    def _should_await_prefix(self, sequence: Sequence) -> bool:
        """Whether a running sequence is computing the very block that this one would have to start with."""
        if sequence.awaited is None or not self.pool.is_pending(sequence.awaited):
            digests = sequence.digests(self._reusable_blocks(sequence), self.pool.block_size)
            num_cached = len(self.pool.match(digests))
            missing = digests[num_cached] if num_cached < len(digests) else None
            sequence.awaited = missing if missing is not None and self.pool.is_pending(missing) else None
        return sequence.awaited is not None

    def _can_admit(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether a prompt has room as a whole, with a block to spare for each running sequence to grow into."""
        pool = self.pool
        wanted = pool.blocks_for(sequence.num_tokens) - len(cached) + pool.num_unreferenced(cached)
        return self.num_running < self._max_num_seqs and wanted + self.num_running <= pool.num_free

    def _admit(self, sequence: Sequence, cached: list[int]) -> None:
        pool = self.pool
        pool.acquire(cached)
        sequence.add_blocks(cached)
        sequence.add_blocks(pool.allocate(pool.blocks_for(sequence.num_tokens) - len(cached)))
        sequence.num_registered = len(cached)
        sequence.num_computed = len(cached) * pool.block_size
        if self._prefix_caching:
            full = sequence.digests(sequence.num_tokens // pool.block_size, pool.block_size)
            sequence.announced = full[: len(cached) - 1 : -1] if cached else full[::-1]
            pool.announce(sequence.announced)
        if sequence.num_cached_tokens is None:
            sequence.scheduled_at = time.perf_counter()
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            if sequence.index == 0:
                self.cached_prompt_tokens_total += sequence.num_cached_tokens
        sequence.state = SequenceState.PREFILLING
        insort(self._prefilling, sequence, key=_order)

    def _start_decoding(self, sequence: Sequence) -> None:
        self._prefilling.remove(sequence)
        sequence.state = SequenceState.DECODING
        self._decoding = [*self._decoding, sequence]
        self._decode_version += 1

    def _register_full_blocks(self, sequence: Sequence) -> None:
        if not self._prefix_caching:
            return
        block_size = self.pool.block_size
        full = sequence.num_computed // block_size
        for i in range(sequence.num_registered, full):
            digest = sequence.digests(i + 1, block_size)[i]
            self.pool.register(int(sequence.block_table[i]), digest)
            if sequence.announced:
                self.pool.retract([sequence.announced.pop()])
        sequence.num_registered = full

    def _append(self, sequence: Sequence, token: int, finished: list[Finished]) -> None:
        if token == NO_TOKEN:
            finished.append(self._finish(sequence, FinishReason.ERROR, error=_NO_TOKEN_ERROR))
            return
        sequence.append(token)
        constraint = sequence.constraint
        if constraint is not None:
            constraint.advance(token)
            if constraint.error is not None:
                finished.append(self._finish(sequence, FinishReason.ERROR, error=constraint.error))
                return
        if token in sequence.stop_ids:
            stop_reason = None if token in sequence.eos_ids else token
            finished.append(self._finish(sequence, FinishReason.STOP, stop_reason))
        elif constraint is not None and constraint.is_terminated:
            finished.append(self._finish(sequence, FinishReason.STOP, is_complete=True))
        elif sequence.num_tokens >= sequence.max_length:
            finished.append(self._finish(sequence, FinishReason.LENGTH))
        elif constraint is None and sequence.num_tokens == sequence.min_length:
            sequence.set_bias(forbid_stopping=False)
            self._decode_version += 1

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        sequence.num_computed = sequence.num_registered = 0
        sequence.state = SequenceState.WAITING
        heapq.heappush(self._waiting, (sequence.order, sequence))
        self.preemptions_total += 1

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_reason: int | None = None,
        error: str | None = None,
        is_complete: bool = False,
    ) -> Finished:
        self._stop_running(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.key]
        self._num_constrained -= sequence.constraint is not None
        if len(self._waiting) > 2 * self.num_waiting + _STALE_ENTRIES:
            self._waiting = [entry for entry in self._waiting if entry[1].state is SequenceState.WAITING]
            heapq.heapify(self._waiting)
        return Finished(sequence.key, reason, stop_reason, error, is_complete)

    def _stop_running(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue and free its blocks, whatever it was doing."""
        if sequence.state is SequenceState.PREFILLING:
            self._prefilling.remove(sequence)
        elif sequence.state is SequenceState.DECODING:
            self._decoding = [s for s in self._decoding if s is not sequence]
            self._decode_version += 1
        self.pool.retract(sequence.announced)
        sequence.announced = []
        self.pool.release(sequence.blocks())
        sequence.drop_blocks()


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
