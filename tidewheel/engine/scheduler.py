"""Scheduler: which sequences run how many tokens in the next step, and what the step's tokens mean for them."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import zip_longest

from tidewheel.engine.batch import StepOutput
from tidewheel.engine.beam_search import BeamSearch
from tidewheel.engine.blocks import BlockPool
from tidewheel.engine.cost_model import CostModel, StepLoad
from tidewheel.engine.devices.base import ExecutorLimits
from tidewheel.engine.request import FinishReason
from tidewheel.engine.sampling import NO_TOKEN
from tidewheel.engine.sequence import Sequence, SequenceState
from tidewheel.engine.step import Chunk, Finished, Step

_NO_TOKEN_ERROR = "the model gave no token that may be sampled: its logits are not finite, or all are forbidden"
_ALIGNED_BLOCKS = 4  # chunks of this many and more end where a block does
_STALE_ENTRIES = 64  # finished entries that the waiting heap may keep


class Scheduler:
    """Continuous batching: decodes first, prompt chunks in what is left of the step's tokens and time.

    Order is by priority, then arrival. When blocks run out the last in that order is preempted: it gives up its
    blocks, keeps its tokens, and is computed again when there is room. The first in order can always go on, because
    no sequence is longer than the pool; so everything ends.

    The choices of a request start together from the end of its prompt, which is computed once. They share its blocks;
    the last one, if it is not full, is copied by all but one of its holders when they first write to it. So do the
    beams of a search, which run in the same steps, start and are preempted together, and then start over.
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
        self._searches: list[BeamSearch] = []  # those that run
        self._forked: dict[int, Sequence] = {}  # by key; since the last decode, so their last blocks may be shared
        self._prefilled_last = False

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run yet, or not any more for now."""
        return len(self._sequences) - self.num_running

    @property
    def is_searching(self) -> bool:
        """Whether any of the sequences that run are beams."""
        return bool(self._searches)

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
        self.prompt_tokens_total += choices[0].prompt_len
        self._push_with_forks(choices)

    def abort(self, key: int) -> list[Finished]:
        """End a sequence now, and its search if it is a beam, and free the blocks. Nothing if it has already ended."""
        sequence = self._sequences.get(key)
        return [] if sequence is None else self._finish_all(sequence, FinishReason.ABORT)

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

    def commit(self, step: Step, output: StepOutput) -> list[Finished]:
        """Take in the tokens of the step's rows, sampled and scored; return what has ended."""
        block_size = self.pool.block_size
        token_ids: list[int] = output.token_ids.tolist()
        beam_rows: dict[int, int] = {}
        finished: list[Finished] = []
        score_row = len(step.sampled())
        row = 0
        for sequence in step.decodes:
            sequence.num_computed += 1
            if sequence.num_computed % block_size == 0:
                self._register_full_blocks(sequence)
            if sequence.beams is None:
                self._append(sequence, token_ids[row], finished)
            else:
                beam_rows[sequence.key] = row
            row += 1
        for chunk in step.chunks:
            sequence, sampled, is_last = chunk.sequence, chunk.sampled(), chunk.is_last
            scored = token_ids[score_row : score_row + chunk.num_scored]
            score_row += chunk.num_scored
            sequence.num_computed += chunk.num_tokens
            sequence.num_scored += chunk.num_scored
            self._register_full_blocks(sequence)
            if sampled:
                self._start_decoding(sampled)
            elif is_last:
                finished += [self._finish(choice, FinishReason.LENGTH) for choice in self._choices(sequence)]
            for started in sampled:
                if started.beams is None:
                    self._append(started, token_ids[row], finished)
                else:
                    beam_rows[started.key] = row
                row += 1
            if NO_TOKEN in scored and sequence.key in self._sequences:
                finished += self._finish_all(sequence, FinishReason.ERROR, error=_NO_TOKEN_ERROR)
        if beam_rows:
            for search in [s for s in self._searches if s.live[0].key in beam_rows]:
                self._advance(search, [beam_rows[beam.key] for beam in search.live], output, finished)
        self.generation_tokens_total += row
        return finished

    def check(self) -> None:
        """Raise AssertionError unless queues and blocks agree with each other."""
        running = self._prefilling + self._decoding
        waiting = [s for _, s in self._waiting if s.state is SequenceState.WAITING]
        waiting += [fork for s in self._sequences.values() for fork in s.waiting_forks]
        searches = {id(s.beams): s.beams for s in self._sequences.values() if s.beams is not None}
        waiting += [s for search in searches.values() for s in search.sequences if s not in search.live]
        assert all(id(search) in searches for search in self._searches)
        assert all(len({s.num_tokens for s in search.live}) == 1 for search in self._searches)
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
        return self.num_running + sum([search.num_idle for search in self._searches])

    @staticmethod
    def _choices(sequence: Sequence) -> Seq[Sequence]:
        """The choices that depend on a sequence's prompt, itself last."""
        return sequence.beams.sequences[::-1] if sequence.beams else (*sequence.waiting_forks, sequence)

    def _make_way(self) -> None:
        """Preempt running sequences of a lower priority than one that waits and could not run otherwise."""
        while (head := self._peek()) is not None and self.num_running:
            last = max(self._prefilling + self._decoding, key=_order)
            if last.priority <= head.priority or self._can_admit(head, self._cached_blocks(head)):
                return
            self._preempt(last)

    def _add_decodes(self, step: Step) -> None:
        """One token of every decoding sequence, each with room for it in a block of its own."""
        block_size = self.pool.block_size
        short = [s for s in self._decoding if s.num_tokens > s.num_blocks * block_size]
        if short or self._forked:
            self._make_room(step)
        step.decodes, step.decode_version = self._decoding, self._decode_version
        step.load = StepLoad(len(self._decoding), sum([s.num_tokens for s in self._decoding]))

    def _make_room(self, step: Step) -> None:
        """Give new blocks to the decoding sequences that have filled theirs, and copies to those that share one."""
        block_size = self.pool.block_size
        while True:
            short = [s for s in self._decoding if s.num_tokens > s.num_blocks * block_size]
            sharing = self._sharing()
            if len(short) + len(sharing) <= self.pool.num_free:
                break
            self._preempt(max(self._prefilling + self._decoding, key=_order))
        for sequence in short:
            sequence.add_blocks(self.pool.allocate(1))
        for sequence in sharing:
            last = sequence.num_blocks - 1
            shared, own = int(sequence.block_table[last]), self.pool.allocate(1)[0]
            step.copies.append((shared, own))
            sequence.block_table[last] = own
            self.pool.release([shared])
        moved = {s.key for s in short} | self._forked.keys()
        self._forked = {}
        step.moved = [row for row, s in enumerate(self._decoding) if s.key in moved]

    def _sharing(self) -> list[Sequence]:
        """The decoding sequences that are about to write to a block that another one will go on with."""
        holders: dict[int, list[Sequence]] = defaultdict(list)
        for sequence in self._forked.values():
            # One whose last block is full gets a new one.
            if sequence.state is SequenceState.DECODING and sequence.num_computed % self.pool.block_size:
                holders[int(sequence.block_table[sequence.num_blocks - 1])].append(sequence)
        return [sequence for sharing in holders.values() for sequence in sharing[1:]]

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
            if (
                not self._can_admit(sequence, cached, step.num_starting)
                or self._chunk_size(step, sequence, start, limit_ms) == 0
            ):
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
        complete = start + tokens == sequence.num_tokens
        if tokens:
            end = min(start + tokens, sequence.prompt_len - 1)
            num_scored = max(end - max(start, sequence.num_scored), 0)
            forks = self._startable_forks(step, sequence) if complete else ()
            step.chunks.append(Chunk(sequence, tokens, num_scored, forks))
            step.load = step.load.plus_chunk(start, tokens, num_scored)
        return complete

    def _chunk_size(self, step: Step, sequence: Sequence, start: int, limit_ms: float | None) -> int:
        """How many tokens from position `start` fit in the step; with `limit_ms`, also in that time."""
        left = sequence.num_tokens - start
        room = self._max_num_batched_tokens - step.load.num_tokens
        scored = sequence.num_scored < sequence.prompt_len - 1
        fitting = left if limit_ms is None else self.cost_model.chunk_tokens(step.load, start, limit_ms, scored=scored)
        if not self._chunked_prefill:
            return left if left <= room and (left <= fitting or not step.chunks) else 0
        block_size = self.pool.block_size
        if _ALIGNED_BLOCKS * block_size <= fitting < left:
            # Ending at a block's end makes the block available to others at once; a small chunk would lose too much.
            fitting = (start + fitting) // block_size * block_size - start
        return min(left, room, fitting)

    def _push_with_forks(self, choices: Seq[Sequence]) -> None:
        """Queue the first of some choices to compute the prompt for all."""
        first, *forks = choices
        if first.beams is None:
            first.forks = forks
        heapq.heappush(self._waiting, (first.order, first))

    def _peek(self) -> Sequence | None:
        """The first waiting sequence in order."""
        while self._waiting and self._waiting[0][1].state is not SequenceState.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _pop(self) -> Sequence:
        return heapq.heappop(self._waiting)[1]

    def _reusable_blocks(self, sequence: Sequence) -> int:
        return sequence.num_reusable // self.pool.block_size if self._prefix_caching else 0

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

    def _can_admit(self, sequence: Sequence, cached: list[int], num_starting: int = 0) -> bool:
        """Whether a prompt has room as a whole, with a block to spare for each running sequence to grow into.

        `num_starting` sequences will run after this step, besides those that already do.
        """
        pool = self.pool
        wanted = pool.blocks_for(sequence.num_tokens) - len(cached) + pool.num_unreferenced(cached)
        beams = 1 if sequence.beams is None else sequence.beams.width
        running = self._num_taken + num_starting + beams
        return running <= self._max_num_seqs and wanted + running - 1 <= pool.num_free

    def _startable_forks(self, step: Step, sequence: Sequence) -> list[Sequence]:
        """As many of a prompt's other choices as may run beside the rest, each with a block to grow into."""
        running = self._num_taken + step.num_starting
        return sequence.waiting_forks[: max(min(self._max_num_seqs, self.pool.num_free) - running, 0)]

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
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            if sequence.index == 0:
                self.cached_prompt_tokens_total += sequence.num_cached_tokens
        if sequence.beams is not None:
            self._searches.append(sequence.beams)
        sequence.state = SequenceState.PREFILLING
        insort(self._prefilling, sequence, key=_order)

    def _start_decoding(self, sampled: list[Sequence]) -> None:
        """A prompt is computed: its sequence goes on to decode, and so do those forks that had room."""
        sequence, *starting = sampled
        self._prefilling.remove(sequence)
        for fork in starting:
            self._share_blocks(sequence, fork)
        for started in sampled:
            started.state = SequenceState.DECODING
        for fork in sequence.waiting_forks:
            heapq.heappush(self._waiting, (fork.order, fork))
        sequence.forks = []
        self._decoding = [*self._decoding, *sampled]
        self._decode_version += 1

    def _share_blocks(self, sequence: Sequence, fork: Sequence) -> None:
        """Let `fork` be where `sequence` is, on the same blocks."""
        wanted, held = sequence.blocks(), fork.blocks()
        common = 0
        while common < len(held) and held[common] == wanted[common]:
            common += 1
        self.pool.acquire(wanted[common:])
        self.pool.release(held[common:])
        fork.become(sequence)
        self._forked |= {sequence.key: sequence, fork.key: fork}

    def _advance(self, search: BeamSearch, rows: list[int], output: StepOutput, finished: list[Finished]) -> None:
        """Let a search take in the step's rows of its live beams, and do what it makes of them."""
        assert output.top_ids is not None
        assert output.top_logprobs is not None
        if (output.token_ids[rows] == NO_TOKEN).any():
            finished += self._finish_all(search.live[0], FinishReason.ERROR, error=_NO_TOKEN_ERROR)
            return
        before, count = search.live, search.num_candidates
        moves = search.advance(output.top_ids[rows, :count], output.top_logprobs[rows, :count])
        if not moves:
            for sequence, result in zip_longest(search.sequences, search.results):
                if result is None:  # one more beam than results were wanted
                    self._finish(sequence, FinishReason.ABORT)
                else:
                    end = self._finish(sequence, result.finish_reason, result.stop_reason)
                    finished.append(replace(end, hypothesis=result))
            return
        for move in moves:
            if move.sequence is not move.parent:
                self._share_blocks(move.parent, move.sequence)
        for move in moves:
            move.sequence.append(move.token)
        starting = [s for s in search.live if s.state is SequenceState.WAITING]
        idle = {s.key for s in before} - {s.key for s in search.live}
        if starting or idle:
            for sequence in starting:
                sequence.state = SequenceState.DECODING
            for sequence in before:
                if sequence.key in idle:
                    self._release(sequence)
                    sequence.state = SequenceState.WAITING
            self._decoding = [*(s for s in self._decoding if s.key not in idle), *starting]
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
        if token in sequence.stop_ids:
            stop_reason = None if token in sequence.eos_ids else token
            finished.append(self._finish(sequence, FinishReason.STOP, stop_reason))
        elif sequence.num_tokens >= sequence.max_length:
            finished.append(self._finish(sequence, FinishReason.LENGTH))
        elif sequence.num_tokens == sequence.min_length:
            sequence.set_bias(forbid_stopping=False)
            self._decode_version += 1

    def _preempt(self, sequence: Sequence) -> None:
        search = sequence.beams
        for preempted in [sequence] if search is None else search.live:
            self._stop_running(preempted)
            preempted.state = SequenceState.WAITING
        if search is not None:
            sequence = search.sequences[0]
            sequence.rewind()
            search.start(search.sequences)
        heapq.heappush(self._waiting, (sequence.order, sequence))
        self.preemptions_total += 1

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> Finished:
        self._stop_running(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.key]
        if forks := sequence.waiting_forks:
            self._push_with_forks(forks)
        if len(self._waiting) > 2 * self.num_waiting + _STALE_ENTRIES:
            self._waiting = [entry for entry in self._waiting if entry[1].state is SequenceState.WAITING]
            heapq.heapify(self._waiting)
        return Finished(sequence.key, reason, stop_reason, error)

    def _finish_all(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> list[Finished]:
        """End a sequence, and with one beam of a search all of them."""
        ending = [sequence] if sequence.beams is None else sequence.beams.sequences
        return [self._finish(s, reason, error=error) for s in ending]

    def _stop_running(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue and free its blocks, whatever it was doing."""
        if sequence.state is SequenceState.PREFILLING:
            self._prefilling.remove(sequence)
        elif sequence.state is SequenceState.DECODING:
            self._decoding = [s for s in self._decoding if s is not sequence]
            self._decode_version += 1
        if sequence.beams in self._searches:
            self._searches.remove(sequence.beams)
        self.pool.retract(sequence.announced)
        sequence.announced = []
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks())
        sequence.drop_blocks()


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
