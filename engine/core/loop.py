"""EngineLoop: the engine thread. Once a step: take in messages, schedule, run, commit, deliver.

A device that can is given the next step before the last one is waited for, if what that samples does not change it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from msgspec import Struct

from ..cancellation import LoadCancelledError
from ..constraints.masks import MaskWriter
from ..devices.batch import TokenMasks
from ..devices.executor import Executor, Pending
from ..errors import DeviceError
from ..histogram import Histogram
from ..machine.memory import release_free_memory
from ..media.encoder import MediaEncoder
from ..outputs import FinishReason
from ..scheduling.async_scheduling import drop_ended
from ..scheduling.batch_builder import BatchBuilders
from ..scheduling.scheduler import Scheduler
from ..scheduling.step import Finished, Step
from ..sequences.sequence import Sequence
from ..side_work import SideWork, SideWorkTurns
from .engine_core_outputs import EngineCoreOutputs, outputs_of

if TYPE_CHECKING:
    from ..hosting.turns import Turn

logger = logging.getLogger(__name__)

_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_REST_AFTER_S = 1.0
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Abort(Struct, frozen=True):
    """The message that these sequences are not wanted any more."""

    keys: list[int]


class _Started(Struct, frozen=True):
    """A step that the device runs."""

    step: Step
    masks: TokenMasks | None
    pending: Pending
    started: float


Message: TypeAlias = list[Sequence] | Abort | Callable[[], None] | None


class EngineLoop:
    """Owns scheduler, builder and executor from `start` on. Other threads only leave messages."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        masks: MaskWriter,
        deliver: Callable[[EngineCoreOutputs], None],
        encoder: MediaEncoder[list[Sequence]] | None = None,
        turn: Turn | None = None,
    ) -> None:
        """`deliver` is called on the engine thread, at most once a step and once for the messages before it.
        Requests with media wait in the `encoder` before they are scheduled.
        Where others compute on the same cores, a step waits for its `turn`.

        `step_started` is when the step that runs began (`time.perf_counter`), None between steps.
        """
        self.steps_total = 0
        self.step_seconds = Histogram(_STEP_SECONDS)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.step_started: float | None = None
        self._scheduler = scheduler
        self._builder = BatchBuilders(executor.limits, scheduler.max_in_flight)
        self._executor = executor
        self._masks = masks
        self._deliver = deliver
        self._encoder = encoder
        self._side_work = SideWorkTurns(scheduler.cost_model.max_step_ms)
        if encoder is not None:
            self._side_work.add(encoder)
        self._overlapped: _Started | None = None  # the step after the one that is being ended
        self._in_flight: deque[_Started] = deque()  # of a device that runs several steps at a time
        self._last_ended = 0.0
        self._inbox: deque[Message] = deque()
        self._wake = threading.Event()
        self._rests = False
        self._turn = turn
        self._thread = threading.Thread(target=self._run, name="tidewheel-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def add_side_work(self, work: SideWork) -> None:
        """Have this computed, too, between the steps. Call it before `start`."""
        self._side_work.add(work)

    def start(self) -> None:
        """Start the thread."""
        self._executor.watch(self.wake)
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
        """Abort everything, close the executor and side work, and end the thread."""
        self._post(None)
        self._executor.stop_restarting()

    def close(self) -> None:
        """Close the executor and side work of a loop that was not started."""
        self._side_work.close()
        self._executor.close()

    def wake(self) -> None:
        """Have the thread look at what it waits for, from any thread."""
        self._wake.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end, if it was ever started; whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _post(self, message: Message) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _run(self) -> None:
        ended_by: BaseException | None = None
        try:
            self._executor.pin_caller()
            while self._take_messages():
                self._take_turn()
                try:
                    self._step()
                except DeviceError as failure:
                    if not self._executor.can_restart:
                        raise
                    self._restart(failure)
                self.step_started = None
        except BaseException as failure:  # of any kind: no stream may be left waiting
            ended_by = failure
            logger.exception("The engine has failed")
            self._deliver(EngineCoreOutputs(failure=failure))
        finally:
            self.step_started = None
            self._masks.close()
            if self._scheduler.offload is not None:
                self._scheduler.offload.close(saving=ended_by is None, turn=self._turn)
            self._side_work.close(ended_by)
            self._executor.close()
            self._give_turn_back()

    def _take_messages(self) -> bool:
        """Act on all messages, waiting for some if there is nothing to run; False when told to stop."""
        scheduler = self._scheduler
        has_work = scheduler.has_work or self._side_work.is_waiting
        if not has_work and not self._save_idle():
            self._give_turn_back()
            self._wait_for_work()
        self._wake.clear()  # before the inbox is read: a message that comes later wakes again
        if not self._inbox:
            return True
        finished: list[Finished] = []
        running = True
        while self._inbox:
            message = self._inbox.popleft()
            if message is None:
                finished += self._end_last_steps()
                finished += [end for key in scheduler.unfinished for end in scheduler.abort(key)]
                finished += self._drop_encoding(None)
                running = False
                break
            if callable(message):
                message()
            elif isinstance(message, Abort):
                finished += [end for key in message.keys for end in scheduler.abort(key)]
                finished += self._drop_encoding({*message.keys})
            elif self._encoder is not None and message[0].media is not None:
                self._encoder.add(message, message[0].media, message[0].order)
            else:
                scheduler.add(message)
        if finished:
            self._deliver(EngineCoreOutputs(finished=finished))
        return running

    def _take_turn(self) -> None:
        """Wait until nobody else computes on the same cores."""
        if self._turn is not None:
            self._scheduler.cost_model.num_others = self._turn.take()

    def _give_turn_back(self) -> None:
        if self._turn is not None:
            self._turn.give_back()

    def _save_idle(self) -> bool:
        offload = self._scheduler.offload
        if offload is None or not offload.has_idle:
            return False
        self._take_turn()
        return offload.save_idle()

    def _wait_for_work(self) -> None:
        """Wait for a message. After a while without one, memory that only steps need goes back to the system."""
        if self._rests or self._wake.wait(_REST_AFTER_S):
            self._wake.wait()
            return
        self._executor.release_scratch()
        release_free_memory()
        self._rests = True
        self._wake.wait()

    def _end_last_steps(self) -> list[Finished]:
        """Take in the steps that were started; the ends of those whose step is lost, because the device has ended."""
        try:
            while self._in_flight:
                self._end(self._in_flight.popleft())
        except DeviceError as failure:
            if not self._executor.can_restart:
                raise
            self._in_flight.clear()
            return self._scheduler.lose_cache(str(failure))
        return []

    def _restart(self, failure: DeviceError) -> None:
        """End what runs, each with an error, and start the device's processes again. What waits goes on waiting."""
        self.step_started = None
        self._in_flight.clear()
        ended = self._scheduler.lose_cache(f"{failure}. The answer is incomplete; send the request again")
        logger.error("%s: %d sequences end with an error, and all stages are restarted", failure, len(ended))
        if ended:
            self._deliver(EngineCoreOutputs(finished=ended))
        self._builder = BatchBuilders(self._executor.limits, self._scheduler.max_in_flight)
        with contextlib.suppress(LoadCancelledError):  # the message to stop is there
            self._executor.restart(failure)

    def _step(self) -> None:
        self._executor.check()
        self._rests = False
        self.step_started = time.perf_counter()
        self._work_beside()
        if not (self._scheduler.has_work or self._in_flight):
            return
        if self._scheduler.max_in_flight > 1:
            self._step_of_many()
            return
        if (started := self._overlapped or self._begin()) is None:
            return
        following = self._scheduler.schedule_async(started.step) if not self._inbox else None
        self._overlapped = None if following is None else self._start(following, None)
        self._end(started)
        if self._overlapped is not None and not self._scheduler.has_work:
            self._overlapped.pending.wait()
            self._overlapped = None

    def _work_beside(self) -> None:
        """Do side work for a while, and let the requests run that have the embeddings of all their media."""
        spent_s = self._side_work.run(nothing_runs=not self._scheduler.has_work)
        self._scheduler.cost_model.spent_ms = spent_s * 1e3
        for encoded in () if self._encoder is None else self._encoder.take_encoded():
            if encoded.error is None:
                self._scheduler.add(encoded.prompt)
            else:
                ends = [Finished(s.key, FinishReason.ERROR, error=encoded.error) for s in encoded.prompt]
                self._deliver(EngineCoreOutputs(finished=ends))

    def _drop_encoding(self, keys: set[int] | None) -> list[Finished]:
        """End choices whose media are being encoded: those of `keys`, or all."""
        if self._encoder is None:
            return []
        finished: list[Finished] = []

        def is_dropped(choices: list[Sequence]) -> bool:
            ending = [s for s in choices if keys is None or s.key in keys]
            finished.extend(Finished(s.key, FinishReason.ABORT) for s in ending)
            choices[:] = [s for s in choices if s not in ending]
            return not choices

        self._encoder.drop(is_dropped)
        return finished

    def _step_of_many(self) -> None:
        """Start as many steps as may be, and end the first of them."""
        while len(self._in_flight) < self._scheduler.max_in_flight and (begun := self._begin()) is not None:
            self._in_flight.append(begun)
        if self._in_flight:
            self.step_started = self._in_flight[0].started
            self._end(self._in_flight.popleft())

    def _begin(self) -> _Started | None:
        scheduler, offload = self._scheduler, self._scheduler.offload
        if offload is not None:
            offload.restore(scheduler.num_running)
        step = scheduler.schedule()
        if step is None:
            if scheduler.has_work and not self._in_flight:
                if offload is None or (until := offload.waits_until) is None:
                    raise RuntimeError("no sequence can run although some are unfinished")
                if scheduler.cost_model.spent_ms > 0:  # there was side work, and there may be more
                    return None
                self.step_started = None
                self._give_turn_back()
                self._wake.wait(max(until - time.perf_counter(), 0.0))
            return None
        masks: TokenMasks | None = None
        if scheduler.has_constraints:
            masks = self._masks.start(step.rows.constraints, step.rows.lookaheads)
        return self._start(step, masks)

    def _start(self, step: Step, masks: TokenMasks | None) -> _Started:
        batch = self._builder.build(step, masks)
        if self._scheduler.offload is not None:
            self._scheduler.offload.save_before_step()
        started = time.perf_counter()
        for group, pairs in step.copies.items():
            self._executor.copy_blocks(np.array(pairs, dtype=np.int32), group)
        if step.state_copies:
            self._executor.copy_states(np.array(step.state_copies, dtype=np.int32))
        pending = self._executor.start(batch)
        self._scheduler.begin_step(step)
        return _Started(step, masks, pending, started)

    def _end(self, begun: _Started) -> None:
        scheduler, step, masks = self._scheduler, begun.step, begun.masks
        output = begun.pending.wait()
        if step.is_async:
            output = drop_ended(step, output)
        passed_on = self._executor.yield_core(len(output.token_ids))  # before the event loop is woken
        if masks is not None:
            masks.wait()  # a device that does not sample itself may not have
        started, ended = max(begun.started, self._last_ended), time.perf_counter()
        self._last_ended = ended
        # What grammars take says nothing of the device: fewer tokens of prompts would not make such a step shorter.
        device_s = ended - started - (0.0 if masks is None else masks.waited_s)
        device_s *= 1 + len(self._in_flight)  # of stages that are all busy, the last one ends a step each such time
        scheduler.cost_model.observe(step.load, device_s * 1e3)
        assert self.step_started is not None
        self.step_seconds.observe(ended - self.step_started)
        self.step_tokens.observe(step.rows.num_tokens)
        self.steps_total += 1
        outputs = outputs_of(step, output, ended)
        outputs.preempted, outputs.passed_on = step.preempted, passed_on
        outputs.finished = scheduler.commit(step, output)
        if (
            outputs.passed_on
            or outputs.keys
            or outputs.started
            or outputs.scored
            or outputs.finished
            or outputs.preempted
        ):
            self._deliver(outputs)
        scheduler.end_step(step)
