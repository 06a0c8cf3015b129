"""Prompts: which prompts a step computes, and how much of each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING

from ..cache.manager import CacheManager, Prefix
from ..cost_model import CostModel
from ..devices.limits import ExecutorLimits
from ..sequences.sequence import Sequence
from .beams import Beams
from .fair_share import FairShares
from .forks import Forks
from .prompt_delay import PromptDelay
from .running import Running
from .step import Step
from .step_room import StepRoom
from .waiting import Turn, WaitingQueue

if TYPE_CHECKING:
    from ..cache.tiers.offload import Offload

_LOOKED_AHEAD = 32  # of those who wait, for the prefixes that they have in common with one that is admitted
_MAX_WITHOUT_SLOT = 32  # of those who wait for another adapter's end, that a step passes over

_turn = itemgetter(0)


class Prompts:
    """Admits sequences that wait, and cuts their prompts into chunks that fit into steps.

    `num_deferred` wait for a prefix that they share with a sequence which computes it now, or that is read from disk
    by `offload`. `cached_tokens_total` are the prompts' tokens that were found in the cache. `num_starting` forks will
    run after the steps that have not ended.
    """

    def __init__(
        self,
        cache: CacheManager,
        cost_model: CostModel,
        limits: ExecutorLimits,
        room: StepRoom,
        delay: PromptDelay,
        *,
        running: Running,
        waiting: WaitingQueue,
        shares: FairShares,
        forks: Forks,
        beams: Beams,
    ) -> None:
        self.num_deferred = 0
        self.cached_tokens_total = 0
        self.offload: Offload | None = None
        self.num_starting = 0
        self.max_num_seqs = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._runs_many_steps = limits.pipeline_stages > 1
        self._cache = cache
        self._room = room
        self._delay = delay
        self._cost_model = cost_model
        self._chunked_prefill = limits.chunked_prefill
        self._max_loras = limits.max_loras
        self._running = running
        self._waiting = waiting
        self._shares = shares
        self._num_clients = 0  # who have prompts left, when the step was begun
        self._forks = forks
        self._beams = beams

    @property
    def num_taken(self) -> int:
        """Sequences that run, and those that running searches may need."""
        return len(self._running) + self._beams.num_idle + self.num_starting

    def choices(self, sequence: Sequence) -> Seq[Sequence]:
        """The choices that depend on a sequence's prompt, itself last."""
        if sequence.search is None:
            return (*self._forks.of(sequence), sequence)
        return self._beams.sequences(sequence.search)[::-1]

    def add_chunks(self, step: Step) -> None:
        """Fill the step with prompt tokens: of prompts already begun and of new ones, as clients take turns.

        Of one client, a new prompt comes after those that it has begun.
        """
        self.num_deferred = 0
        self._delay.begin_step()
        if not self._running.prefilling and self._waiting.peek() is None:
            return
        deferred: list[Sequence] = []
        without_slot: list[Sequence] = []  # of an adapter that has to wait for another one's end
        self._take_turns(step, deferred, without_slot)
        for sequence in deferred:
            self._waiting.put_back(sequence)
            self.num_deferred += len(self.choices(sequence))
        for sequence in without_slot:
            self._waiting.put_back(sequence)

    def _take_turns(self, step: Step, deferred: list[Sequence], without_slot: list[Sequence]) -> None:
        """Add chunks until the step is full or no prompt may have one. Prompts that it skips go to the two lists."""
        may_delay = bool(self._running.decoding) or self._cost_model.num_others is not None
        limit_ms = self._cost_model.limit_ms(step.load) if may_delay else None
        self._num_clients = self._count_clients()
        begun = self._begun()
        may_admit: bool | None = None  # unknown before the first that waits has its turn
        while True:
            sequence = None if may_admit is False else self._waiting.peek()
            if begun and (sequence is None or self._goes_before(begun[0], sequence)):
                _, sequence = begun.popleft()
                if not self._add_chunk(step, sequence, limit_ms):
                    if step.rows.chunks or not self._cache.has_windows:
                        return
                    may_admit = False  # it lacks blocks, which other prompts of the step may have
                continue
            if sequence is None:
                return
            if may_admit is None:
                may_admit = not self._delay.holds(is_idle=not self._running)
                continue
            if self._cache.should_await_prefix(sequence):
                deferred.append(self._waiting.pop())
                self._give_turn(sequence, begun)
                continue
            # Once one waits for an adapter's slot, later ones with adapters wait too, or they would take it for ever.
            if sequence.adapter >= 0 and (without_slot or not self._has_slot(sequence)):
                without_slot.append(self._waiting.pop())
                may_admit = len(without_slot) < _MAX_WITHOUT_SLOT
                continue
            prefix = self._cache.cached(sequence)
            start = prefix.num_blocks * self._cache.block_size
            if (
                not self.can_admit(sequence, prefix, step.rows.num_starting)
                or self._room.chunk_tokens(step, sequence, start, limit_ms) == 0
            ):
                may_admit = False  # later ones wait too, or they would take its place for ever
                continue
            if self.offload is not None and self.offload.should_wait(sequence, prefix):
                deferred.append(self._waiting.pop())
                continue
            self._admit(self._waiting.pop(), prefix)
            if self._cache.takes_snapshots:
                self._cache.look_ahead(sequence, self._waiting.sequences()[:_LOOKED_AHEAD])
            if not self._add_chunk(step, sequence, limit_ms):
                return

    def _count_clients(self) -> int:
        """How many clients have prompts left."""
        begun = {sequence.client for sequence in self._running.prefilling}
        return self._waiting.num_clients + len([client for client in begun if not self._waiting.has(client)])

    def _begun(self) -> deque[tuple[Turn, Sequence]]:
        """The prompts already begun that may go on, in turn, which is `Sequence.order` if there is only one client.

        A prompt has the turn of one behind it that is of the same client, if that one's is earlier.
        """
        begun: list[tuple[Turn, Sequence]] = []
        earliest: dict[str, Turn] = {}
        for sequence in reversed(self._running.prefilling):
            client, turn = sequence.client, (sequence.priority, sequence.virtual_finish)
            if self._num_clients > 1:
                if client not in earliest and self._waiting.has(client):
                    turn = min(turn, self._waiting.turn(client))
                earliest[client] = turn = min(turn, earliest.get(client, turn))
            if not sequence.in_flight:
                begun.append((turn, sequence))
        begun.reverse()
        if self._num_clients > 1:
            begun.sort(key=_turn)
        return deque(begun)

    def _goes_before(self, begun: tuple[Turn, Sequence], sequence: Sequence) -> bool:
        """Whether a prompt already begun goes before a sequence that waits."""
        return begun[1].client == sequence.client or begun[0] <= self._waiting.turn(sequence.client)

    @staticmethod
    def _give_turn(sequence: Sequence, begun: deque[tuple[Turn, Sequence]]) -> None:
        """Let the prompt go on now, if it waits for its own turn, whose prefix a sequence needs."""
        for turn, maker in begun:
            if sequence.awaited in maker.announced:
                begun.remove((turn, maker))
                begun.appendleft(((sequence.priority, -inf), maker))
                return

    def _add_chunk(self, step: Step, sequence: Sequence, limit_ms: float | None) -> bool:
        """Run what fits of a prompt, up to a snapshot; whether all of it fits, so that the next one may come."""
        start = sequence.num_computed
        fitting = self._reachable(sequence, self._room.chunk_tokens(step, sequence, start, limit_ms))
        tokens = self._cache.chunk_tokens(sequence, fitting)
        if sequence.media is not None:
            tokens = sequence.media.uncut(start, tokens, tokens)
        complete = start + tokens == sequence.num_tokens
        if tokens:
            self._shares.compute(sequence, tokens, self._num_clients)
            end = min(start + tokens, sequence.prompt_len - 1)
            num_scored = max(end - max(start, sequence.num_scored), 0)
            ready = (sequence, *self._startable_forks(step, sequence)) if complete else ()
            step.rows.add_chunk(
                sequence,
                tokens,
                num_scored=num_scored,
                sampling=ready if sequence.num_tokens < sequence.max_length else (),
                started=self._started(ready) if start + tokens == sequence.prompt_len else (),
                counts_early=self._runs_many_steps and not complete and not num_scored,
            )
            step.load = step.load.plus_chunk(start, tokens, num_scored)
        return start + fitting == sequence.num_tokens

    def _reachable(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of the next tokens of a prompt have room if blocks come chunk by chunk."""
        start = sequence.num_computed
        reachable = self._cache.ensure_slots(sequence, start + num_tokens, len(self._running) - 1) - start
        return reachable if self._chunked_prefill or reachable == num_tokens else 0

    def can_admit(self, sequence: Sequence, prefix: Prefix, num_starting: int = 0) -> bool:
        """Whether a prompt has room as a whole, with a block to spare for each running sequence to grow into.

        `num_starting` sequences will run after this step, besides those that already do.
        """
        beams = 1 if sequence.search is None else sequence.search.width
        running = self.num_taken + num_starting + beams
        return (
            running <= self.max_num_seqs
            and self._has_slot(sequence)
            and self._cache.has_room(sequence, prefix, running - 1)
        )

    def _has_slot(self, sequence: Sequence) -> bool:
        """Whether a step may have its adapter beside the adapters of running sequences."""
        if sequence.adapter < 0:
            return True
        adapters = {running.adapter for running in self._running.sequences() if running.adapter >= 0}
        return len(adapters | {sequence.adapter}) <= self._max_loras

    def _startable_forks(self, step: Step, sequence: Sequence) -> list[Sequence]:
        """The prompt's other choices that may run beside the rest, each with a block to grow into."""
        running = self.num_taken + step.rows.num_starting
        return self._forks.of(sequence)[: max(min(self.max_num_seqs, self._cache.num_free) - running, 0)]

    def _started(self, ready: Seq[Sequence]) -> Seq[Sequence]:
        """The choices whose prompt those who go on from its end have computed; all sequences of a search have one."""
        search = ready[0].search if ready else None
        return ready if search is None else self._beams.sequences(search)

    def _admit(self, sequence: Sequence, prefix: Prefix) -> None:
        self._cache.allocate(sequence, prefix)
        self._delay.admitted()
        if sequence.num_cached_tokens is None:
            sequence.scheduled_at = time.perf_counter()
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            if sequence.index == 0:
                self.cached_tokens_total += sequence.num_cached_tokens
            self._shares.admit(sequence, sequence.num_tokens - sequence.num_computed)
        else:
            self._shares.admit(sequence, 0)
        if sequence.search is not None:
            self._beams.admit(sequence.search)
        self._running.admit(sequence)
