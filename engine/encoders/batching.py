"""BatchQueue: chooses which waiting inputs run together, with little padding and short waits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .encoder import Encoder
from .pooling import Floats
from .tasks import Task
from .tokenization import EncoderInput

MAX_BATCH_TOKENS = 1024
"""Padding included. On a CPU, larger batches are not more efficient, and the next input would wait longer."""
SHORT_TOKENS = 64
"""A request of so many tokens at most may go between two pieces of a longer batch: it takes about as long as one."""
# Padding takes as long as text. Small batches of similar lengths were 10% faster than full ones with 20% padding.
_MAX_PADDING = 0.05  # of the real tokens
_FREE_PADDING = 16  # tokens
_NO_RESULT: Floats = np.empty(0, np.float32)


class Job:
    """One request: its inputs, and their `results`, as the task says. `client` is who it is for."""

    def __init__(self, encoder: Encoder, task: Task, inputs: Sequence[EncoderInput], client: str = "") -> None:
        self.encoder = encoder
        self.task = task
        self.client = client
        self.inputs = inputs
        self.results: list[Floats] = [_NO_RESULT] * len(inputs)
        self.num_unfinished = len(inputs)
        self.num_tokens = sum(map(len, inputs))
        self.failure: Exception | None = None

    @property
    def kind(self) -> tuple[Encoder, Task]:
        """What inputs must have in common to run together."""
        return self.encoder, self.task


@dataclass(slots=True, eq=False)
class Item:
    """One input of a job."""

    job: Job
    index: int
    length: int
    taken: bool = field(default=False)

    @property
    def input(self) -> EncoderInput:
        """The input itself."""
        return self.job.inputs[self.index]


def choose_batch(
    lengths: Sequence[int], anchor: int, max_tokens: int = MAX_BATCH_TOKENS, *, pads: bool = True
) -> tuple[int, int]:
    """The slice of sorted `lengths` around `anchor` to run as one batch, as (start, end).

    The slice grows towards the nearer length, while the batch, padded to its longest input if it `pads`, has at most
    `max_tokens` tokens and little padding. An input with more tokens than that runs alone.
    """
    start, end, total = anchor, anchor + 1, lengths[anchor]
    while True:
        sides: list[tuple[int, int, int]] = []
        if start > 0:
            sides.append((lengths[start] - lengths[start - 1], start - 1, end))
        if end < len(lengths):
            sides.append((lengths[end] - lengths[end - 1], start, end + 1))
        for _, new_start, new_end in sorted(sides):
            real = total + (lengths[new_start] if new_start < start else lengths[new_end - 1])
            padded = (new_end - new_start) * lengths[new_end - 1] if pads else real
            if padded <= max_tokens and padded - real <= max(_FREE_PADDING, _MAX_PADDING * real):
                start, end, total = new_start, new_end, real
                break
        else:
            return start, end


class BatchQueue:
    """The waiting inputs. Each batch is formed around an input of one job. Clients take turns, and so do the jobs of a
    client. So a small job does not wait for all of a large one, nor for all jobs of another client. The batch is filled
    with inputs of similar length from any job of the same encoder and task.
    """

    def __init__(self) -> None:
        # Each client's jobs, those first whose turn comes first.
        self._turns: dict[str, deque[tuple[Job, list[Item]]]] = {}
        self._waiting: dict[tuple[Encoder, Task], list[Item]] = {}  # sorted by length

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def add(self, job: Job) -> None:
        """Queue a job's inputs."""
        items = sorted((Item(job, i, len(item)) for i, item in enumerate(job.inputs)), key=_length)
        waiting = self._waiting.setdefault(job.kind, [])
        for item in items:
            insort(waiting, item, key=_length)
        self._turns.setdefault(job.client, deque()).append((job, items))

    def remove(self, job: Job) -> None:
        """Forget a job's inputs, except those in a batch that was already taken."""
        if jobs := deque(turn for turn in self._turns.get(job.client, ()) if turn[0] is not job):
            self._turns[job.client] = jobs
        else:
            self._turns.pop(job.client, None)
        self._waiting[job.kind] = [item for item in self._waiting.get(job.kind, ()) if item.job is not job]

    def num_waiting(self, encoder: Encoder) -> int:
        """How many inputs wait for an encoder. May be called from any thread."""
        return sum(len(self._waiting.get((encoder, task), ())) for task in encoder.tasks)

    def next_batch(self) -> list[Item]:
        """Take the inputs to run next, all for one encoder and task. Empty if nothing waits."""
        while self._turns:
            client = next(iter(self._turns))
            jobs = self._turns.pop(client)
            while jobs:
                _, own = jobs[0]
                while own and own[-1].taken:
                    own.pop()
                if own:
                    jobs.rotate(-1)
                    self._turns[client] = jobs  # behind all others
                    return self._around(own[-1], MAX_BATCH_TOKENS)
                jobs.popleft()
        return []

    def next_short(self, without: Encoder | None) -> list[Item]:
        """Take what is left of the first job of few tokens that is not for the encoder `without`, if there is one.

        It was its client's turn.
        """
        for client, jobs in self._turns.items():
            for job, own in jobs:
                if job.num_tokens <= SHORT_TOKENS and job.encoder is not without:
                    while own and own[-1].taken:
                        own.pop()
                    if own:
                        self._turns[client] = self._turns.pop(client)  # behind all others
                        return self._around(own[-1], SHORT_TOKENS)
        return []

    def _around(self, item: Item, max_tokens: int) -> list[Item]:
        waiting = self._waiting[item.job.kind]
        anchor = waiting.index(item, bisect_left(waiting, item.length, key=_length))
        start, end = anchor, anchor + 1
        if item.job.encoder.takes_batches:
            first = max(anchor - max_tokens, 0)  # no batch reaches further: an input has a token or more
            near = [other.length for other in waiting[first : anchor + max_tokens]]
            start, end = (first + i for i in choose_batch(near, anchor - first, max_tokens, pads=item.job.encoder.pads))
        batch = waiting[start:end]
        del waiting[start:end]
        for other in batch:
            other.taken = True
        return batch


def _length(item: Item) -> int:
    return item.length
