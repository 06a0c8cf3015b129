"""EngineLoop: the engine thread. Once a step: take in messages, schedule, run, commit, deliver."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tidewheel.engine.batch import StepOutput
from tidewheel.engine.batch_builder import BatchBuilder
from tidewheel.engine.constraints.masks import MaskWriter
from tidewheel.engine.devices.base import Executor
from tidewheel.engine.request import TokenLogprob
from tidewheel.engine.scheduler import Finished, Scheduler, Step
from tidewheel.engine.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Delivery:
    """What a step, or a message, means for the streams: `token_ids[i]` belongs to the sequence `keys[i]`.

    `logprobs` has the log-probabilities of those rows that asked. `started` are the keys of sequences that were
    sampled from for the first time, with the prompt tokens they found in the cache. With a `failure`, the engine
    is dead and every stream with it.
    """

    keys: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    started: list[tuple[int, int]] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failure: BaseException | None = None


class EngineLoop:
    """Owns scheduler, builder and executor from `start` on. Other threads only leave messages."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, masks: MaskWriter, deliver: Callable[[Delivery], None]
    ) -> None:
        """`deliver` is called on the engine thread, at most once a step and once for the messages before it."""
        self.steps_total = 0
        self._scheduler = scheduler
        self._builder = BatchBuilder()
        self._executor = executor
        self._masks = masks
        self._deliver = deliver
        self._inbox: deque[list[Sequence] | list[int] | None] = deque()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidewheel-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, sequences: list[Sequence]) -> None:
        """Hand over new sequences."""
        self._post(sequences)

    def abort(self, keys: list[int]) -> None:
        """End these sequences before the next step; those that have already ended are passed over."""
        self._post(keys)

    def stop(self) -> None:
        """Abort everything, close the executor, and end the thread."""
        self._post(None)

    def join(self) -> None:
        """Wait for the thread to end, if it was ever started."""
        if self._thread.ident is not None:
            self._thread.join()

    def _post(self, message: list[Sequence] | list[int] | None) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _run(self) -> None:
        try:
            while self._take_messages():
                self._step()
        except BaseException as failure:  # whatever it was, nobody may be left waiting
            logger.exception("The engine has failed")
            self._deliver(Delivery(failure=failure))
        finally:
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
        finished: list[Finished | None] = []
        running = True
        while self._inbox:
            message = self._inbox.popleft()
            if message is None:
                finished += [scheduler.abort(key) for key in scheduler.unfinished]
                running = False
                break
            for item in message:
                if isinstance(item, Sequence):
                    scheduler.add(item)
                else:
                    finished.append(scheduler.abort(item))
        ended = [end for end in finished if end is not None]
        if ended:
            self._deliver(Delivery(finished=ended))
        return running

    def _step(self) -> None:
        scheduler = self._scheduler
        step = scheduler.schedule()
        if step is None:
            if scheduler.has_work:
                raise RuntimeError("no sequence can run although some are unfinished")
            return
        batch = self._builder.build(step)
        masks = batch.sampling.masks = self._masks.start(step.sampled()) if scheduler.has_constraints else None
        started = time.perf_counter()
        output = self._executor.step(batch)
        if masks is not None:
            masks.wait()  # a device that does not sample itself may not have
        scheduler.cost_model.observe(step.load, (time.perf_counter() - started) * 1e3)
        self.steps_total += 1
        delivery = _delivery(step, output)
        delivery.finished = scheduler.commit(step, delivery.token_ids)
        if delivery.keys:
            self._deliver(delivery)


def _delivery(step: Step, output: StepOutput) -> Delivery:
    rows = step.sampled()
    done = rows[len(step.decodes) :]
    started = [(s.key, s.num_cached_tokens or 0) for s in done if s.num_tokens == s.prompt_len]
    delivery = Delivery([s.key for s in rows], output.token_ids.tolist(), started=started)
    if output.logprobs is not None:
        for row, sequence in enumerate(rows):
            if sequence.num_logprobs >= 0:
                delivery.logprobs[sequence.key] = _token_logprob(output, row, sequence.num_logprobs)
    return delivery


def _token_logprob(output: StepOutput, row: int, count: int) -> TokenLogprob:
    assert output.logprobs is not None
    logprob = float(output.logprobs[row])
    if count == 0 or output.top_ids is None or output.top_logprobs is None:
        return TokenLogprob(logprob)
    ids, values = output.top_ids[row, :count].tolist(), output.top_logprobs[row, :count].tolist()
    return TokenLogprob(logprob, tuple(zip(ids, values, strict=True)))
