"""EncoderLoop: the encoder thread. In a loop it takes in messages, forms a batch, runs it and delivers the results."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import TidewheelError
from .batching import BatchQueue, Item, Job
from .encoder import Encoder

logger = logging.getLogger(__name__)

_NICE = 10  # gets about a tenth of a core that the chat model also wants, or a whole core that is free


@dataclass(slots=True)
class EncoderCounts:
    """What one encoder has computed since the start. Tokens do not include padding."""

    batches: int = 0
    tokens: int = 0
    padding: int = 0


class EncoderLoop:
    """Owns the queue and runs all encoders, from `start` on. Other threads only leave messages."""

    def __init__(
        self,
        encoders: Sequence[Encoder],
        deliver: Callable[[list[Job], BaseException | None], None],
        *,
        has_priority: bool = False,
    ) -> None:
        """`deliver` is called on the encoder thread, with finished jobs or with the error that has ended the thread.

        Unless it `has_priority`, the thread gives way to a chat model's.
        """
        self._has_priority = has_priority
        self.counts = {encoder: EncoderCounts() for encoder in encoders}
        self.queue = BatchQueue()
        self._deliver = deliver
        self._inbox: deque[tuple[Callable[[Job], None], Job] | None] = deque()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidewheel-encoders", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, job: Job) -> None:
        """Hand over a new job."""
        self._post((self.queue.add, job))

    def abort(self, job: Job) -> None:
        """Remove a job's waiting inputs from the queue."""
        self._post((self.queue.remove, job))

    def stop(self) -> None:
        """End the thread, even in the middle of a batch."""
        self._post(None)
        for encoder in self.counts:
            encoder.interrupt()

    def join(self) -> None:
        """Wait for the thread to end, if it was ever started."""
        if self._thread.ident is not None:
            self._thread.join()

    def _post(self, message: tuple[Callable[[Job], None], Job] | None) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _run(self) -> None:
        try:
            if not self._has_priority:
                lower_thread_priority()
            while self._take_messages():
                batch = self.queue.next_batch()
                if batch and (ended := self._run_batch(batch)):
                    self._deliver(ended, None)
        except BaseException as failure:  # after any error, no request may be left waiting
            logger.exception("The encoders have failed")
            self._deliver([], failure)

    def _take_messages(self) -> bool:
        """Handle all messages, and wait for one if there is nothing to run. False when told to stop."""
        if not self.queue:
            self._wake.wait()
        self._wake.clear()  # before the inbox is read: a message that comes later wakes again
        while self._inbox:
            message = self._inbox.popleft()
            if message is None:
                return False
            act, job = message
            act(job)
        return True

    def _run_batch(self, batch: list[Item]) -> list[Job]:
        """Run inputs, and return the jobs that are finished then."""
        encoder, task = batch[0].job.kind
        try:
            results = encoder.run(task, [item.input for item in batch])
        except Exception as failure:
            if len(batch) == 1:
                return self._fail(batch[0], failure)
            # One bad input must not fail the others of its batch.
            return [job for item in batch if item.job.failure is None for job in self._run_batch([item])]
        lengths = [item.length for item in batch]
        counts = self.counts[encoder]
        counts.batches += 1
        counts.tokens += sum(lengths)
        if encoder.pads:
            counts.padding += max(lengths) * len(lengths) - sum(lengths)
        ended: list[Job] = []
        for item, result in zip(batch, results, strict=True):
            job = item.job
            if job.failure is not None:
                continue
            if not np.isfinite(result).all():
                ended += self._fail(item, TidewheelError("the model gave values that are not finite"))
                continue
            job.results[item.index] = result.copy()  # a view would keep the whole batch
            job.num_unfinished -= 1
            if not job.num_unfinished:
                ended.append(job)
        return ended

    def _fail(self, item: Item, failure: Exception) -> list[Job]:
        item.job.failure = failure
        self.queue.remove(item.job)
        return [item.job]


def lower_thread_priority() -> None:
    """Give the calling thread, and threads that it starts, a lower priority than the chat model's, if possible."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        try:
            os.nice(_NICE)
        except OSError as error:  # a sandbox may forbid it
            logger.warning("The encoders' threads keep their priority and may slow the chat model: %s", error)
