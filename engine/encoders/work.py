"""EncoderWork: what encoders have to compute, batch by batch, and each batch piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import TidewheelError
from ..side_work import SideWork
from .batching import SHORT_TOKENS, BatchQueue, Item, Job
from .encoder import Encoder
from .pooling import Floats


@dataclass(slots=True)
class EncoderCounts:
    """What one encoder has computed since the start. Tokens do not include padding."""

    batches: int = 0
    tokens: int = 0
    padding: int = 0


@dataclass(slots=True, eq=False)
class _Batch:
    """Inputs that are run together, and what runs their pieces."""

    items: Sequence[Item]
    encoder: Encoder
    pieces: Generator[None, None, list[Floats]]

    @property
    def num_tokens(self) -> int:
        return sum(item.length for item in self.items)


class EncoderWork(SideWork):
    """Owns the queue of some encoders. A request of a few tokens goes between two pieces of a longer batch.

    Everything is called on the thread that runs it: the engine thread, between the steps of a chat model, or the
    encoders' own.
    """

    def __init__(self, encoders: Sequence[Encoder], deliver: Callable[[list[Job], BaseException | None], None]) -> None:
        """`deliver` is called with finished jobs, or with the error that has ended the thread."""
        self.counts = {encoder: EncoderCounts() for encoder in encoders}
        self.queue = BatchQueue()
        self._deliver = deliver
        self._begun: list[_Batch] = []  # the last one runs; those before it go on when it has ended
        self._is_owed = False  # the longer batch has not run since a short one has

    def add(self, job: Job) -> None:
        """Queue a job's inputs."""
        self.queue.add(job)

    def abort(self, job: Job) -> None:
        """Forget a job's inputs, except those that share a batch that was begun with another job's."""
        self._drop(job, TidewheelError("the request was aborted"))

    @property
    def is_waiting(self) -> bool:
        """See SideWork."""
        return bool(self._begun) or bool(self.queue)

    def run_piece(self, piece_s: float, *, nothing_runs: bool) -> bool:
        """See SideWork."""
        batch = self._next()
        if batch is None:
            return False
        batch.encoder.set_piece(piece_s)
        try:
            next(batch.pieces)
            return True
        except StopIteration as end:
            ended = self._finish(batch, end.value)
        except Exception as failure:
            ended = self._fail(batch, failure)
        if ended:
            self._deliver(ended, None)
        return True

    def close(self, failure: BaseException | None = None) -> None:
        """See SideWork."""
        self._begun.clear()
        self.queue = BatchQueue()
        if failure is not None:
            self._deliver([], failure)

    def _next(self) -> _Batch | None:
        """The batch whose piece runs next."""
        items: list[Item] = []
        if not self._begun:
            items = self.queue.next_batch()
        elif len(self._begun) == 1 and (running := self._begun[0]).num_tokens > SHORT_TOKENS:
            if not self._is_owed:
                items = self.queue.next_short(running.encoder if running.encoder.is_within_layer else None)
            self._is_owed = bool(items)
        if items:
            self._begin(items)
        return self._begun[-1] if self._begun else None

    def _begin(self, items: Sequence[Item]) -> None:
        encoder, task = items[0].job.kind
        self._begun.append(_Batch(items, encoder, encoder.pieces(task, [item.input for item in items])))

    def _finish(self, batch: _Batch, results: Sequence[Floats]) -> list[Job]:
        """Take the results, and return the jobs that are finished."""
        self._begun.remove(batch)
        lengths = [item.length for item in batch.items]
        counts = self.counts[batch.encoder]
        counts.batches += 1
        counts.tokens += sum(lengths)
        if batch.encoder.pads:
            counts.padding += max(lengths) * len(lengths) - sum(lengths)
        ended: list[Job] = []
        for item, result in zip(batch.items, results, strict=True):
            job = item.job
            if job.failure is not None:
                continue
            if not np.isfinite(result).all():
                self._drop(job, TidewheelError("the model gave values that are not finite"))
                ended.append(job)
                continue
            job.results[item.index] = result.copy()  # a view would keep the whole batch
            job.num_unfinished -= 1
            if not job.num_unfinished:
                ended.append(job)
        return ended

    def _fail(self, batch: _Batch, failure: Exception) -> list[Job]:
        """Run the inputs of a batch that has failed one by one: one bad input must not fail the others."""
        self._begun.remove(batch)
        if len(batch.items) == 1:
            (item,) = batch.items
            self._drop(item.job, failure)
            return [item.job]
        for item in reversed(batch.items):
            if item.job.failure is None:
                self._begin([item])
        return []

    def _drop(self, job: Job, failure: Exception) -> None:
        job.failure = failure
        self.queue.remove(job)
        self._begun = [batch for batch in self._begun if any(item.job.failure is None for item in batch.items)]
