"""Scheduler: which sequences run how many tokens in the next step, and what the step's tokens mean for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

from ..cache.manager import CacheManager
from ..cost_model import CostModel, StepLoad
from ..devices.batch import StepOutput
from ..devices.limits import ExecutorLimits
from ..devices.sampling import NO_TOKEN
from ..outputs import FinishReason
from ..sequences.sequence import Sequence, SequenceState
from ..speculation.drafter import BatchDrafter, Drafter
from ..speculation.drafts import Drafts
from .async_scheduling import AsyncScheduling
from .beams import Beams
from .decodes import Decodes
from .endings import NO_TOKEN_ERROR, append
from .fair_share import FairShares
from .forks import Forks
from .preemption import MustWaitError, Preemption
from .prompt_delay import PromptDelay
from .prompts import Prompts
from .running import Running
from .step import Finished, Step
from .step_room import StepRoom
from .waiting import WaitingQueue

if TYPE_CHECKING:
    from ..cache.tiers.offload import Offload


class Scheduler:
    """Continuous batching: decodes first, prompt chunks in what is left of the step's tokens and time.

    Order is by priority, then arrival; within a priority clients take turns, see FairShares. When blocks run out the
    last by priority and arrival is preempted: it gives up its blocks, keeps its tokens, and is computed again when
    there is room. The first of those that run can always go on, because no sequence is longer than the cache; so
    everything ends.

    The choices of a request start together from the end of its prompt, which is computed once. So do the beams of a
    search, which run in the same steps, are preempted together, and then start over.
    """

    def __init__(
        self,
        cost_model: CostModel,
        limits: ExecutorLimits,
        *,
        enable_prefix_caching: bool = True,
        drafter: Drafter | BatchDrafter | None = None,
        max_drafted: int | None = None,
        delay_factor: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """A `drafter` drafts tokens, as long as no more than `max_drafted` sequences decode. Without one, drafts are
        only what a grammar forces. `delay_factor` is PromptDelay's. `clock`, in seconds, measures what drafts take.

        Raises ValueError for a drafter with fixed shapes, or with recurrent layers that cannot go back.
        """
        if drafter is not None and limits.draft_limit == 0:
            why = (
                "with fixed shapes"
                if limits.shapes
                else "whose recurrent state cannot go back before a rejected draft token"
            )
            raise ValueError(f"drafts cannot be run by a device {why}")
        if drafter is not None:  # draft tokens are chosen for all that decode together
            limits = replace(limits, pipeline_stages=1)
        self.max_in_flight = limits.pipeline_stages
        self.cache = CacheManager(limits, prefix_caching=enable_prefix_caching)
        self.cost_model = cost_model
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self._room = StepRoom(limits, cost_model)
        # Whole prompts may be too long to fit beside the decodes, so they get steps of their own.
        self._mixed_steps = limits.mixed_steps and limits.chunked_prefill
        self._sequences: dict[int, Sequence] = {}
        self._shares = FairShares()
        self._waiting = WaitingQueue(self._shares, lambda s: self.cache.cached(s).num_blocks * self.cache.block_size)
        self._running = Running()
        self._forks = Forks(self.cache, self._waiting)
        self._beams = Beams(self.cache, self._running)
        self._prompts = Prompts(
            self.cache,
            cost_model,
            limits,
            self._room,
            PromptDelay(delay_factor),
            running=self._running,
            waiting=self._waiting,
            shares=self._shares,
            forks=self._forks,
            beams=self._beams,
        )
        self._preemption = Preemption(
            self.cache,
            limits,
            running=self._running,
            waiting=self._waiting,
            beams=self._beams,
            prompts=self._prompts,
        )
        drafts = (
            None
            if limits.draft_limit == 0 or self.max_in_flight > 1
            else Drafts(
                drafter,
                self.cache,
                cost_model,
                limits.max_num_batched_tokens,
                max_sequences=max_drafted,
                max_draft_tokens=limits.draft_limit,
                clock=clock,
            )
        )
        self._decodes = Decodes(
            self.cache, self.max_in_flight, drafts, running=self._running, preemption=self._preemption
        )
        # Recurrent state is kept for reuse as it is between two steps, and a draft begins with the last token.
        is_async = limits.async_scheduling and not limits.num_states and drafter is None
        self._async = AsyncScheduling(self.cache, self._running, self._waiting) if is_async else None
        self._prefilled_last = False
        self._leaving: set[int] = set()  # keys of those that end with the step that they are in

    @property
    def offload(self) -> Offload | None:
        """Keeps the cache's blocks on disk; None: they are not kept. Set it before sequences are added."""
        return self._prompts.offload

    @offload.setter
    def offload(self, offload: Offload) -> None:
        self._prompts.offload = offload

    @property
    def drafts(self) -> Drafts | None:
        """Drafts tokens; None: nothing is drafted."""
        return self._decodes.drafts

    @property
    def has_constraints(self) -> bool:
        """Whether any sequence has a constraint."""
        return self._decodes.num_constrained > 0

    @property
    def cached_prompt_tokens_total(self) -> int:
        """Tokens of prompts that were found in the cache."""
        return self._prompts.cached_tokens_total

    @property
    def preemptions_total(self) -> int:
        """How often a sequence had to make way."""
        return self._preemption.total

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run yet, or not any more for now."""
        return len(self._sequences) - self.num_running

    @property
    def num_deferred(self) -> int:
        """How many of them wait for a prefix: another sequence computes it now, or it is read from disk."""
        return min(self._prompts.num_deferred, self.num_waiting)

    def adapters(self) -> tuple[Set[int], Set[int]]:
        """The numbers of the adapters of sequences that run, and of those that wait; from any thread."""
        running: set[int] = set()
        waiting: set[int] = set()
        for sequence in list(self._sequences.values()):
            if sequence.adapter >= 0:
                (waiting if sequence.state is SequenceState.WAITING else running).add(sequence.adapter)
        return running, waiting

    def prompts_left_ms(self) -> float | None:
        """How long it will take to compute what is left of all prompts, were nothing of them cached, from any thread.

        None as long as little is known of the device. What waits for a prompt that others compute counts once.
        """
        load = StepLoad()
        for sequence in (*self._running.prefilling, *self._waiting.sequences()):
            load = load.plus_chunk(sequence.num_computed, max(sequence.num_tokens - sequence.num_computed, 0))
        return self.cost_model.prompts_ms(load) if load.prefill_tokens else 0.0

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
            self._decodes.added(sequence)
        nobody_waits = not self._running.prefilling and self._waiting.peek() is None
        self._shares.add(choices[0], len(choices), nobody_waits=nobody_waits)
        self.prompt_tokens_total += choices[0].prompt_len
        if (search := choices[0].search) is not None:
            self._beams.add(search, choices)
            self._waiting.push(choices[0])
        else:
            self._forks.push(choices)

    def abort(self, key: int) -> list[Finished]:
        """End a sequence now, and its search if it is a beam, and free the blocks. Nothing if it has already ended."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return []
        if sequence.in_flight:
            self._leaving.add(key)
            return []
        return self._finish_all(sequence, FinishReason.ABORT)

    def schedule(self) -> Step | None:
        """Choose the next step; None when there is nothing to run, or not before a step that runs has ended.

        Of `max_in_flight` steps, which have no sequence in common, each may be started before the others have ended.
        They are committed in order. Searches run one step at a time.
        """
        if self._preemption.num_in_flight and self._decodes.num_searching:
            return None
        step = Step()
        try:
            self._fill(step)
        except MustWaitError:
            return None
        step.rows.has_beams = self._beams.are_running
        step.load = self._room.padded(step)
        if step.rows:
            step.state_copies = self.cache.take_state_copies()
        return step if step.rows else None

    def begin_step(self, step: Step) -> None:
        """Note that a step was started. If several may be started, other steps do not get its sequences."""
        if self.max_in_flight == 1:
            return
        self._preemption.num_in_flight += 1
        self._prompts.num_starting += step.rows.num_starting
        for chunk in step.rows.chunks:
            if chunk.counts_early:  # later steps find its K and V
                chunk.sequence.num_computed = chunk.end
                self.cache.advance(chunk.sequence)
        self._set_in_flight(step, True)

    def _fill(self, step: Step) -> None:
        self._preemption.make_way(step)
        if self.cache.has_windows:
            self._preemption.make_room_for_prompts(step)
        if self._mixed_steps:
            self._decodes.add(step)
            self._prompts.add_chunks(step)
        else:
            # Steps of one kind alternate, so that neither kind waits for the other to run dry.
            kinds = [self._prompts.add_chunks, self._decodes.add]
            for add in reversed(kinds) if self._prefilled_last else kinds:
                if not step.rows:
                    add(step)
            self._prefilled_last = bool(step.rows.chunks)

    def schedule_async(self, step: Step) -> Step | None:
        """The step after one that runs and was not committed yet; None if that has to be first."""
        following = None if self._async is None else self._async.after(step)
        if following is not None:
            following.load = self._room.padded(following)
        return following

    def commit(self, step: Step, output: StepOutput) -> list[Finished]:
        """Take in the tokens of the step's rows, sampled and scored; return what has ended."""
        rows, finished = step.rows, list[Finished]()
        if self.max_in_flight > 1:
            self._preemption.num_in_flight -= 1
            self._prompts.num_starting -= rows.num_starting
            self._set_in_flight(step, False)
        block_size = self.cache.block_size
        token_ids: list[int] = output.token_ids.tolist()
        for sequence in rows.decodes:
            sequence.num_computed = computed = sequence.num_computed + 1
            if computed % block_size == 0:
                self.cache.advance(sequence)
        for draft in rows.drafts:
            num_kept = draft.num_kept(token_ids)
            for token in draft.token_ids[1:num_kept]:  # the last one kept is appended with those of the others
                draft.sequence.append(token)
                if draft.sequence.constraint is not None:
                    draft.sequence.constraint.advance(token)
            draft.sequence.num_computed += num_kept
            self.cache.advance(draft.sequence)
            self.generation_tokens_total += num_kept - len(draft.token_ids)
            if self.drafts is not None:
                self.drafts.learn(draft.sequence, len(draft.token_ids) - 1, num_kept - 1)
        for chunk in rows.chunks:
            sequence = chunk.sequence
            if chunk.counts_early:
                continue
            sequence.num_computed = chunk.end
            sequence.num_scored += chunk.num_scored
            self.cache.advance(sequence)
            if chunk.sampling:
                self._forks.start(sequence, chunk.sampling[1:])
                self._running.start_decoding(chunk.sampling)
            elif chunk.end == sequence.num_tokens:
                finished += [
                    self._finish(Finished(s.key, FinishReason.LENGTH)) for s in self._prompts.choices(sequence)
                ]
        for sequence, token in rows.newest(token_ids):
            if (end := append(sequence, token)) is not None:
                finished.append(self._finish(end))
            elif sequence.num_tokens == sequence.min_length:
                self._running.decode_version += 1  # its stop tokens are allowed from now on
        for chunk in rows.chunks:
            if NO_TOKEN in token_ids[rows.scored(chunk)] and chunk.sequence.key in self._sequences:
                finished += self._finish_all(chunk.sequence, FinishReason.ERROR, NO_TOKEN_ERROR)
        if rows.has_beams:
            finished += self._advance_beams(step, output)
        self.generation_tokens_total += rows.num_sampled
        return finished + self._leave() if self._leaving else finished

    def end_step(self, step: Step) -> None:
        """Note that the engine's own work in a step is done, after its tokens were passed on."""
        if self.drafts is not None and not step.rows.chunks:
            self.drafts.end_step(drafted=bool(step.rows.drafts))

    def forget(self) -> None:
        """Let sequences that are added from now on find nothing of earlier ones."""
        (self.offload or self.cache).forget()
        if self.drafts is not None:
            self.drafts.forget()

    def lose_cache(self, error: str) -> list[Finished]:
        """Forget all steps that were started and all that was cached, because the cache's content is gone.

        Requests with a running sequence end with `error`. Those that wait stay, also if they had begun before they were
        preempted: they hold no blocks, and are computed again from their first token.
        """
        self._preemption.num_in_flight = self._prompts.num_starting = 0
        self._leaving.clear()
        requests = {sequence.request for sequence in self._running.sequences()}
        ending = [sequence for sequence in self._sequences.values() if sequence.request in requests]
        for sequence in ending:
            sequence.in_flight = False
        finished = [self._finish(Finished(s.key, FinishReason.ERROR, error=error)) for s in ending]
        self.cache.take_state_copies()
        self.forget()
        if self.drafts is not None:
            self.drafts.lose_cache()
        return finished

    def _set_in_flight(self, step: Step, in_flight: bool) -> None:
        for sequence in step.rows.decodes:
            sequence.in_flight = in_flight
        for chunk in step.rows.chunks:
            if not chunk.counts_early:
                chunk.sequence.in_flight = in_flight
            for sequence in chunk.sampling:
                sequence.in_flight = in_flight

    def _leave(self) -> list[Finished]:
        """End those who were to end with a step that has."""
        finished = []
        for key in list(self._leaving):
            sequence = self._sequences.get(key)
            if sequence is None or not sequence.in_flight:
                self._leaving.discard(key)
                finished += [] if sequence is None else self._finish_all(sequence, FinishReason.ABORT)
        return finished

    def _advance_beams(self, step: Step, output: StepOutput) -> list[Finished]:
        finished = []
        for sequence, result in self._beams.advance(step.rows, output):
            if result is None:
                end = Finished(sequence.key, FinishReason.ERROR, error=NO_TOKEN_ERROR)
            else:
                end = Finished(sequence.key, result.finish_reason, result.stop_reason, hypothesis=result)
            finished.append(self._finish(end))
        return finished

    def _finish(self, end: Finished) -> Finished:
        """Forget a sequence in any state, and free its blocks."""
        sequence = self._sequences.pop(end.key)
        self._shares.end(sequence)
        self._running.remove(sequence)
        self.cache.release(sequence)
        if self.offload is not None:
            self.offload.end(sequence.key)
        sequence.state = SequenceState.FINISHED
        self._decodes.ended(sequence)
        if sequence.search is None:
            self._forks.leave(sequence)
        else:
            self._beams.leave(sequence.search)
        self._waiting.end(sequence, self.num_waiting)
        return end

    def _finish_all(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> list[Finished]:
        """End a sequence, and with one beam of a search all of them."""
        ending = [sequence] if sequence.search is None else self._beams.sequences(sequence.search)
        return [self._finish(Finished(s.key, reason, error=error)) for s in ending]
