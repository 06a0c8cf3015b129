"""Scheduler: which sequences run how many tokens in the next step, and what the step's tokens mean for them."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import zip_longest

from ..cache.blocks import BlockPool
from ..devices.base import ExecutorLimits
from ..devices.batch import StepOutput
from ..devices.sampling import NO_TOKEN
from ..outputs import FinishReason
from .beam_search import BeamSearch
from .beams import Beams
from .cost_model import CostModel, StepLoad
from .sequence import Sequence, SequenceState
from .sequence_blocks import SequenceBlocks
from .step import Finished, Step
from .waiting import WaitingQueue

_NO_TOKEN_ERROR = "the model gave no token that may be sampled: its logits are not finite"
_ALIGNED_BLOCKS = 4  # chunks of this many and more end where a block does


class Scheduler:
    """Continuous batching: decodes first, prompt chunks in what is left of the step's tokens and time.

    Order is by priority, then arrival. When blocks run out the last in that order is preempted: it gives up its
    blocks, keeps its tokens, and is computed again when there is room. The first in order can always go on, because
    no sequence is longer than the pool; so everything ends.

    The choices of a request start together from the end of its prompt, which is computed once. So do the beams of a
    search, which run in the same steps, are preempted together, and then start over.
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
        self._blocks = SequenceBlocks(pool, prefix_caching=enable_prefix_caching)
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._prefilling: list[Sequence] = []  # in order
        self._decoding: list[Sequence] = []  # replaced, never changed in place: steps refer to it
        self._decode_version = 0
        self._beams: dict[BeamSearch, Beams] = {}
        self._searches: list[Beams] = []  # those that run
        self._prefilled_last = False
        self._num_constrained = 0
        self._num_deferred = 0

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
    def num_deferred(self) -> int:
        """Those of them that wait for a prefix that they share with a sequence which computes it now."""
        return min(self._num_deferred, self.num_waiting)

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self._sequences)

    @property
    def unfinished(self) -> list[int]:
        """The keys of all sequences that have been added and have not ended."""
        return list(self._sequences)

    def add(self, choices: Seq[Sequence]) -> None:
        """Queue the choices of one request, which have one prompt."""
        for sequence in choices:
            self._sequences[sequence.key] = sequence
            self._num_constrained += sequence.constraint is not None
        self.prompt_tokens_total += choices[0].prompt_len
        if (search := choices[0].search) is not None:
            self._beams[search] = Beams(search, choices)
        self._push_with_forks(choices)

    def abort(self, key: int) -> list[Finished]:
        """End a sequence now, and its search if it is a beam, and free the blocks. Nothing if it has already ended."""
        sequence = self._sequences.get(key)
        return [] if sequence is None else self._finish_all(sequence, FinishReason.ABORT)

    def schedule(self) -> Step | None:
        """Choose the next step; None when there is nothing to run."""
        step = Step()
        self._make_way(step)
        if self._mixed_steps:
            self._add_decodes(step)
            self._add_chunks(step)
        else:
            # Steps of one kind alternate, so that neither kind waits for the other to run dry.
            kinds = [self._add_chunks, self._add_decodes]
            for add in reversed(kinds) if self._prefilled_last else kinds:
                if not step.rows:
                    add(step)
            self._prefilled_last = bool(step.rows.chunks)
        step.rows.has_beams = bool(self._searches)
        return step if step.rows else None

    def commit(self, step: Step, output: StepOutput) -> list[Finished]:
        """Take in the tokens of the step's rows, sampled and scored; return what has ended."""
        block_size = self.pool.block_size
        rows, finished = step.rows, list[Finished]()
        token_ids: list[int] = output.token_ids.tolist()
        for sequence, token in zip(rows.decodes, token_ids, strict=False):  # rows of chunks follow
            sequence.num_computed += 1
            if sequence.num_computed % block_size == 0:
                self._blocks.register_full(sequence)
            if sequence.search is None:
                self._append(sequence, token, finished)
        for chunk in rows.chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.end
            sequence.num_scored += chunk.num_scored
            self._blocks.register_full(sequence)
            if chunk.sampling:
                self._start_decoding(chunk.sampling)
            elif sequence.num_computed == sequence.num_tokens:
                finished += [self._finish(choice, FinishReason.LENGTH) for choice in self._choices(sequence)]
            for started, token in zip(chunk.sampling, token_ids[chunk.sampled], strict=True):
                if started.search is None:
                    self._append(started, token, finished)
            if NO_TOKEN in token_ids[rows.scored(chunk)] and sequence.key in self._sequences:
                finished += self._finish_all(sequence, FinishReason.ERROR, error=_NO_TOKEN_ERROR)
        if rows.has_beams:
            beam_rows = {beam.key: row for row, beam in enumerate(rows.sampled) if beam.search is not None}
            for beams in [b for b in self._searches if b.live[0].key in beam_rows]:
                self._advance(beams, [beam_rows[beam.key] for beam in beams.live], output, finished)
        self.generation_tokens_total += rows.num_sampled
        return finished

    def check(self) -> None:
        """Raise AssertionError unless queues and blocks agree with each other."""
        running = self._prefilling + self._decoding
        waiting = self._waiting.sequences()
        waiting += [fork for s in self._sequences.values() for fork in s.waiting_forks]
        waiting += [s for beams in self._beams.values() for s in beams.sequences if s not in beams.live]
        assert self._beams.keys() == {s.search for s in self._sequences.values() if s.search is not None}
        assert all(beams.search in self._beams for beams in self._searches)
        assert all(len({s.num_tokens for s in beams.live}) == 1 for beams in self._searches)
        assert self._num_taken <= self._max_num_seqs
        assert sorted(s.key for s in running + waiting) == sorted(self._sequences)
        assert all(s.state is SequenceState.PREFILLING for s in self._prefilling)
        assert all(s.state is SequenceState.DECODING for s in self._decoding)
        assert all(s.num_computed == s.num_tokens - 1 for s in self._decoding)
        assert all(s.num_blocks == s.num_computed == 0 and not s.announced for s in waiting)
        assert all(s.num_computed <= s.num_blocks * self.pool.block_size for s in running)
        self.pool.check([s.blocks() for s in running])

    @property
    def _num_taken(self) -> int:
        """Sequences that run, and those that running searches may need."""
        return self.num_running + sum([beams.num_idle for beams in self._searches])

    def _choices(self, sequence: Sequence) -> Seq[Sequence]:
        """The choices that depend on a sequence's prompt, itself last."""
        if sequence.search is None:
            return (*sequence.waiting_forks, sequence)
        return self._beams[sequence.search].sequences[::-1]

    def _make_way(self, step: Step) -> None:
        """Preempt running sequences of a lower priority than one that waits and could not run otherwise."""
        while (head := self._waiting.peek()) is not None and self.num_running:
            last = max(self._prefilling + self._decoding, key=_order)
            if last.priority <= head.priority or self._can_admit(head, self._blocks.cached(head)):
                return
            self._preempt(last, step)

    def _add_decodes(self, step: Step) -> None:
        """One token of every decoding sequence, each with room for it in a block of its own."""
        block_size = self.pool.block_size
        short = [s for s in self._decoding if s.num_tokens > s.num_blocks * block_size]
        if short or self._blocks.has_forked:
            self._make_room(step)
        step.rows.set_decodes(self._decoding)
        step.decode_version = self._decode_version
        step.load = StepLoad(len(self._decoding), sum([s.num_tokens for s in self._decoding]))

    def _make_room(self, step: Step) -> None:
        """See to it that each decoding sequence has a block of its own to write to."""
        while True:
            short, sharing = self._blocks.lacking(self._decoding)
            if len(short) + len(sharing) <= self.pool.num_free:
                break
            self._preempt(max(self._prefilling + self._decoding, key=_order), step)
        step.copies, moved = self._blocks.provide(short, sharing)
        step.moved = [row for row, sequence in enumerate(self._decoding) if sequence.key in moved]

    def _add_chunks(self, step: Step) -> None:
        """Fill the step with prompt tokens: of prompts already begun, then of new ones, in order."""
        self._num_deferred = 0
        if not self._prefilling and self._waiting.peek() is None:
            return
        limit_ms = self.cost_model.limit_ms(step.load) if self._decoding else None
        for sequence in self._prefilling:
            if not self._add_chunk(step, sequence, limit_ms):
                return
        deferred: list[Sequence] = []
        while (sequence_or_none := self._waiting.peek()) is not None:
            sequence = sequence_or_none
            if self._blocks.should_await_prefix(sequence):
                deferred.append(self._waiting.pop())
                continue
            cached = self._blocks.cached(sequence)
            start = len(cached) * self.pool.block_size
            if (
                not self._can_admit(sequence, cached, step.rows.num_starting)
                or self._chunk_size(step, sequence, start, limit_ms) == 0
            ):
                break
            self._admit(self._waiting.pop(), cached)
            if not self._add_chunk(step, sequence, limit_ms):
                break
        for sequence in deferred:
            self._waiting.push(sequence)
            self._num_deferred += len(self._choices(sequence))

    def _add_chunk(self, step: Step, sequence: Sequence, limit_ms: float | None) -> bool:
        """Run what fits of a prompt; whether all of it did, so that the next one may come."""
        start = sequence.num_computed
        tokens = self._chunk_size(step, sequence, start, limit_ms)
        complete = start + tokens == sequence.num_tokens
        if tokens:
            end = min(start + tokens, sequence.prompt_len - 1)
            num_scored = max(end - max(start, sequence.num_scored), 0)
            ready = (sequence, *self._startable_forks(step, sequence)) if complete else ()
            step.rows.add_chunk(
                sequence,
                tokens,
                num_scored=num_scored,
                sampling=ready if sequence.num_tokens < sequence.max_length else (),
                started=self._started(ready) if start + tokens == sequence.prompt_len else (),
            )
            step.load = step.load.plus_chunk(start, tokens, num_scored)
        return complete

    def _chunk_size(self, step: Step, sequence: Sequence, start: int, limit_ms: float | None) -> int:
        """How many tokens from position `start` fit in the step; with `limit_ms`, also in that time."""
        left = sequence.num_tokens - start
        room = self._max_num_batched_tokens - step.load.num_tokens
        scored = sequence.num_scored < sequence.prompt_len - 1
        fitting = left if limit_ms is None else self.cost_model.chunk_tokens(step.load, start, limit_ms, scored=scored)
        if not self._chunked_prefill:
            return left if left <= room and (left <= fitting or not step.rows.chunks) else 0
        block_size = self.pool.block_size
        if _ALIGNED_BLOCKS * block_size <= fitting < left:
            # Ending at a block's end makes the block available to others at once; a small chunk would lose too much.
            fitting = (start + fitting) // block_size * block_size - start
        return min(left, room, fitting)

    def _push_with_forks(self, choices: Seq[Sequence]) -> None:
        """Queue the first of some choices to compute the prompt for all."""
        first, *forks = choices
        if first.search is None:
            first.forks = forks
        self._waiting.push(first)

    def _can_admit(self, sequence: Sequence, cached: list[int], num_starting: int = 0) -> bool:
        """Whether a prompt has room as a whole, with a block to spare for each running sequence to grow into.

        `num_starting` sequences will run after this step, besides those that already do.
        """
        beams = 1 if sequence.search is None else sequence.search.width
        running = self._num_taken + num_starting + beams
        wanted = self._blocks.num_wanted(sequence, cached)
        return running <= self._max_num_seqs and wanted + running - 1 <= self.pool.num_free

    def _startable_forks(self, step: Step, sequence: Sequence) -> list[Sequence]:
        """As many of a prompt's other choices as may run beside the rest, each with a block to grow into."""
        running = self._num_taken + step.rows.num_starting
        return sequence.waiting_forks[: max(min(self._max_num_seqs, self.pool.num_free) - running, 0)]

    def _started(self, ready: Seq[Sequence]) -> Seq[Sequence]:
        """The choices whose prompt those who go on from its end have computed; all sequences of a search have one."""
        search = ready[0].search if ready else None
        return ready if search is None else self._beams[search].sequences

    def _admit(self, sequence: Sequence, cached: list[int]) -> None:
        self._blocks.hold(sequence, cached)
        if sequence.num_cached_tokens is None:
            sequence.scheduled_at = time.perf_counter()
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            if sequence.index == 0:
                self.cached_prompt_tokens_total += sequence.num_cached_tokens
        if sequence.search is not None:
            self._searches.append(self._beams[sequence.search])
        sequence.state = SequenceState.PREFILLING
        insort(self._prefilling, sequence, key=_order)

    def _start_decoding(self, sampled: Seq[Sequence]) -> None:
        """A prompt is computed: its sequence goes on to decode, and so do those forks that had room."""
        sequence, *starting = sampled
        self._prefilling.remove(sequence)
        for fork in starting:
            self._blocks.share(sequence, fork)
        for started in sampled:
            started.state = SequenceState.DECODING
        for fork in sequence.waiting_forks:
            self._waiting.push(fork)
        sequence.forks = []
        self._decoding = [*self._decoding, *sampled]
        self._decode_version += 1

    def _advance(self, beams: Beams, rows: list[int], output: StepOutput, finished: list[Finished]) -> None:
        """Let a search take in the step's rows of its live beams, and do what it makes of them."""
        assert output.top_ids is not None
        assert output.top_logprobs is not None
        if (output.token_ids[rows] == NO_TOKEN).any():
            finished += self._finish_all(beams.live[0], FinishReason.ERROR, error=_NO_TOKEN_ERROR)
            return
        before, count = beams.live, beams.search.num_candidates
        moves = beams.advance(output.top_ids[rows, :count], output.top_logprobs[rows, :count])
        if not moves:
            for sequence, result in zip_longest(beams.sequences, beams.search.results):
                if result is None:  # more beams than results: the first choices have the results
                    finished.append(self._finish(sequence, FinishReason.ERROR, error=_NO_TOKEN_ERROR))
                else:
                    end = self._finish(sequence, result.finish_reason, result.stop_reason)
                    finished.append(replace(end, hypothesis=result))
            return
        for move in moves:
            if move.sequence is not move.parent:
                self._blocks.share(move.parent, move.sequence)
        for move in moves:
            move.sequence.append(move.token)
        starting = [s for s in beams.live if s.state is SequenceState.WAITING]
        idle = {s.key for s in before} - {s.key for s in beams.live}
        if starting or idle:
            for sequence in starting:
                sequence.state = SequenceState.DECODING
            for sequence in before:
                if sequence.key in idle:
                    self._blocks.release(sequence)
                    sequence.state = SequenceState.WAITING
            self._decoding = [*(s for s in self._decoding if s.key not in idle), *starting]
            self._decode_version += 1

    def _append(self, sequence: Sequence, token: int, finished: list[Finished]) -> None:
        constraint = sequence.constraint
        if token != NO_TOKEN:
            sequence.append(token)
        if constraint is not None:
            if token != NO_TOKEN:
                constraint.advance(token)
            if (failure := constraint.failure) is not None:
                finished.append(self._finish(sequence, failure.reason, error=failure.message))
                return
        if token == NO_TOKEN:
            finished.append(self._finish(sequence, FinishReason.ERROR, error=_NO_TOKEN_ERROR))
        elif token in sequence.stop_ids:
            stop_reason = None if token in sequence.eos_ids else token
            finished.append(self._finish(sequence, FinishReason.STOP, stop_reason))
        elif constraint is not None and constraint.is_terminated:
            finished.append(self._finish(sequence, FinishReason.STOP, is_complete=True))
        elif sequence.num_tokens >= sequence.max_length:
            finished.append(self._finish(sequence, FinishReason.LENGTH))
        elif constraint is None and sequence.num_tokens == sequence.min_length:
            self._decode_version += 1

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        beams = None if sequence.search is None else self._beams[sequence.search]
        for preempted in [sequence] if beams is None else beams.live:
            self._stop_running(preempted)
            preempted.state = SequenceState.WAITING
        if beams is not None:
            sequence = beams.sequences[0]
            sequence.rewind()
            beams.start()
        self._waiting.push(sequence)
        self.preemptions_total += 1
        step.preempted.append(sequence.key)

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
        if sequence.search is not None:
            self._beams.pop(sequence.search, None)  # all its sequences end together
        self._num_constrained -= sequence.constraint is not None
        if forks := sequence.waiting_forks:
            self._push_with_forks(forks)
        self._waiting.shrink(self.num_waiting)
        return Finished(sequence.key, reason, stop_reason, error, is_complete=is_complete)

    def _finish_all(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> list[Finished]:
        """End a sequence, and with one beam of a search all of them."""
        ending = [sequence] if sequence.search is None else self._beams[sequence.search].sequences
        return [self._finish(s, reason, error=error) for s in ending]

    def _stop_running(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue and free its blocks, whatever it was doing."""
        if sequence.state is SequenceState.PREFILLING:
            self._prefilling.remove(sequence)
        elif sequence.state is SequenceState.DECODING:
            self._decoding = [s for s in self._decoding if s is not sequence]
            self._decode_version += 1
        if sequence.search is not None and (beams := self._beams.get(sequence.search)) in self._searches:
            self._searches.remove(beams)
        self._blocks.release(sequence)


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
