"""EngineLoop: the engine thread. Once a step: take in messages, schedule, run, commit, deliver."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from .constraints.masks import MaskWriter
from .devices.base import Executor
from .devices.batch import StepOutput, TokenMasks
from .histogram import Histogram
from .outputs import PromptLogprobs, SequenceTimes, TokenLogprob
from .scheduling.batch_builder import BatchBuilder
from .scheduling.rows import Chunk
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Sequence
from .scheduling.step import Finished, Step

logger = logging.getLogger(__name__)

_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Started(NamedTuple):
    """A sequence whose prompt is computed for the first time, but for `num_cached_tokens` that were in the cache."""

    key: int
    num_cached_tokens: int
    times: SequenceTimes


@dataclass(slots=True)
class Delivery:
    """What a step, or a message, means for the streams: `token_ids[i]` belongs to the sequence `keys[i]`.

    `logprobs` has the log-probabilities of those rows that asked, and `scored` those of parts of prompts. `preempted`
    sequences had to make way for the step. `passed_on` has to be called when all of it is passed on. With a `failure`,
    the engine is dead and every stream with it.
    """

    keys: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    scored: list[tuple[int, PromptLogprobs]] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    passed_on: Callable[[], None] | None = None
    failure: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """The message that these sequences are not wanted any more."""

    keys: list[int]


Message: TypeAlias = list[Sequence] | Abort | Callable[[], None] | None


class EngineLoop:
    """Owns scheduler, builder and executor from `start` on. Other threads only leave messages."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, masks: MaskWriter, deliver: Callable[[Delivery], None]
    ) -> None:
        """`deliver` is called on the engine thread, at most once a step and once for the messages before it. A step in
        which drafts were right has a delivery more for each further token: none has two tokens of one sequence.

        `step_started` is when the step that runs began (`time.perf_counter`), None between steps.
        """
        self.steps_total = 0
        self.step_seconds = Histogram(_STEP_SECONDS)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.step_started: float | None = None
        self._scheduler = scheduler
        self._builder = BatchBuilder(executor.limits.padding_block)
        self._executor = executor
        self._masks = masks
        self._deliver = deliver
        self._inbox: deque[Message] = deque()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidewheel-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, choices: list[Sequence]) -> None:
        """Hand over the choices of a new request."""
        self._post(choices)

    def abort(self, keys: list[int]) -> None:
        """End these sequences before the next step; those that have already ended are passed over."""
        self._post(Abort(keys))

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` on the engine thread before the next step."""
        self._post(function)

    def stop(self) -> None:
        """Abort everything, close the executor, and end the thread."""
        self._post(None)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end, if it was ever started; whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _post(self, message: Message) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _run(self) -> None:
        try:
            while self._take_messages():
                self._step()
                self.step_started = None
        except BaseException as failure:  # whatever it was, nobody may be left waiting
            logger.exception("The engine has failed")
            self._deliver(Delivery(failure=failure))
        finally:
            self.step_started = None
            self._masks.close()
            self._executor.close()

    def _take_messages(self) -> bool:
        """Act on all messages, waiting for some if there is nothing to run; False when told to stop."""
        scheduler = self._scheduler
        if not scheduler.has_work:
            self._wake.wait()
        self._wake.clear()  # before the inbox is read: a message that comes later wakes again
        if not self._inbox:
            return True
        finished: list[Finished] = []
        running = True
        while self._inbox:
            message = self._inbox.popleft()
            if message is None:
                finished += [end for key in scheduler.unfinished for end in scheduler.abort(key)]
                running = False
                break
            if callable(message):
                message()
            elif isinstance(message, Abort):
                finished += [end for key in message.keys for end in scheduler.abort(key)]
            else:
                scheduler.add(message)
        if finished:
            self._deliver(Delivery(finished=finished))
        return running

    def _step(self) -> None:
        scheduler = self._scheduler
        self.step_started = begun = time.perf_counter()
        step = scheduler.schedule()
        if step is None:
            if scheduler.has_work:
                raise RuntimeError("no sequence can run although some are unfinished")
            return
        masks: TokenMasks | None = None
        if scheduler.has_constraints:
            masks = self._masks.start([sequence.constraint for sequence in step.rows.sampled])
        batch = self._builder.build(step, masks)
        started = time.perf_counter()
        if step.copies:
            self._executor.copy_blocks(np.array(step.copies, dtype=np.int32))
        output = self._executor.start(batch).wait()
        passed_on = self._executor.hand_over(len(output.token_ids))  # before the event loop is woken
        if masks is not None:
            masks.wait()  # a device that does not sample itself may not have
        ended = time.perf_counter()
        # What grammars take says nothing of the device: fewer tokens of prompts would not make such a step shorter.
        device_s = ended - started - (0.0 if masks is None else masks.waited_s)
        scheduler.cost_model.observe(step.load, device_s * 1e3)
        self.step_seconds.observe(ended - begun)
        self.step_tokens.observe(step.rows.num_tokens)
        self.steps_total += 1
        deliveries = _deliveries(step, output, ended)
        deliveries[0].preempted = step.preempted
        deliveries[-1].passed_on = passed_on
        _add_ends(deliveries, scheduler.commit(step, output))
        for delivery in deliveries:
            if (
                delivery.passed_on
                or delivery.keys
                or delivery.started
                or delivery.scored
                or delivery.finished
                or delivery.preempted
            ):
                self._deliver(delivery)


def _deliveries(step: Step, output: StepOutput, now: float) -> list[Delivery]:
    """What a step means for the streams, but for ends: one delivery, and more if a sequence got several tokens."""
    rows = step.rows
    sampled, token_ids = rows.sampled, output.token_ids[: rows.num_sampled].tolist()
    if rows.drafts or rows.has_beams:
        deliveries = _by_turn(rows.kept(token_ids), token_ids, output)
    else:
        deliveries = [Delivery([s.key for s in sampled], token_ids)]
        if output.logprobs is not None:
            deliveries[0].logprobs = _logprobs(enumerate(sampled), output)
    first = deliveries[0]
    for chunk in rows.chunks:
        first.started += _started(chunk, now)
        if chunk.num_scored:
            logprobs = _prompt_logprobs(output, rows.scored(chunk), chunk.sequence.num_prompt_logprobs)
            first.scored.append((chunk.sequence.key, logprobs))
    return deliveries


def _by_turn(kept: list[tuple[Sequence, int]], token_ids: list[int], output: StepOutput) -> list[Delivery]:
    """The first token that each sequence got, then the second of each that got two, and so on. At least one delivery.

    `kept` are the sequences with their rows.
    """
    turns: list[list[tuple[int, Sequence]]] = [[]]
    count: dict[int, int] = defaultdict(int)
    for sequence, row in kept:
        turn = count[sequence.key]
        count[sequence.key] += 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append((row, sequence))
    return [
        Delivery(
            [sequence.key for _, sequence in turn],
            [token_ids[row] for row, _ in turn],
            {} if output.logprobs is None else _logprobs(turn, output),
        )
        for turn in turns
    ]


def _logprobs(rows: Iterable[tuple[int, Sequence]], output: StepOutput) -> dict[int, TokenLogprob]:
    return {
        sequence.key: _token_logprob(output, row, count)
        for row, sequence in rows
        if (count := sequence.sampling.num_logprobs) >= 0
    }


def _add_ends(deliveries: list[Delivery], finished: list[Finished]) -> None:
    """Let each sequence end with its last token."""
    if len(deliveries) == 1:
        deliveries[0].finished = finished
        return
    for end in finished:
        last = next((delivery for delivery in reversed(deliveries) if end.key in delivery.keys), deliveries[0])
        last.finished.append(end)


def _started(chunk: Chunk, now: float) -> list[Started]:
    """What the one that computed the prompt found, and when it was scheduled, goes for all choices."""
    first = chunk.sequence
    num_cached_tokens, scheduled = first.num_cached_tokens or 0, first.scheduled_at
    return [Started(s.key, num_cached_tokens, SequenceTimes(s.queued_at, scheduled, now)) for s in chunk.started]


def _prompt_logprobs(output: StepOutput, rows: slice, count: int) -> PromptLogprobs:
    assert output.logprobs is not None
    assert output.ranks is not None
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    # Copies, so that the whole step's arrays can go.
    return PromptLogprobs(
        output.logprobs[rows].copy(),
        output.ranks[rows].copy(),
        output.top_ids[rows, :count].copy(),
        output.top_logprobs[rows, :count].copy(),
    )


def _token_logprob(output: StepOutput, row: int, count: int) -> TokenLogprob:
    assert output.logprobs is not None
    logprob = float(output.logprobs[row])
    if count == 0 or output.top_ids is None or output.top_logprobs is None:
        return TokenLogprob(logprob)
    ids, values = output.top_ids[row, :count].tolist(), output.top_logprobs[row, :count].tolist()
    return TokenLogprob(logprob, tuple(zip(ids, values, strict=True)))
