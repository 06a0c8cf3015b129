"""A process that holds a part of a model and does what the leader does: `python -m ... DEVICE STORE RANK SIZE`."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator

from ...weights.tensor import DenseTensor
from ..executor import Executor, Pending
from ..grouped_weights import GroupedMatrix
from .device import GraphDevice
from .parallel import Group
from .shards import Shards


def follow(device: str, store: str, rank: int, size: int) -> None:
    """Load a part and run what is sent, until told to close. Raises RuntimeError if the leader has ended."""
    threading.Thread(target=_end_with_the_leader, name="leader", daemon=True).start()
    group = Group(device, store, rank, size)
    group.join()
    kind, options, memory, spec, executor_options = group.receive()
    part = Shards(spec, size).specs[rank]
    executor = GraphDevice(kind, options, memory).load_part(part, _received(group), executor_options, group)
    try:
        _run(executor, group)
    finally:
        executor.close()
        group.leave()


def _end_with_the_leader() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _received(group: Group) -> Iterator[tuple[str, DenseTensor | GroupedMatrix]]:
    while (weight := group.scatter()) is not None:
        yield weight


def _run(executor: Executor, group: Group) -> None:
    started: deque[Pending] = deque()
    while True:
        call, argument = group.receive()
        if call == "start":
            started.append(executor.start(argument))
        elif call == "wait":
            started.popleft().wait()
        elif call == "copy_blocks":
            executor.copy_blocks(*argument)
        elif call == "warm_up":
            executor.warm_up(lambda done, steps: None)
        else:
            return


if __name__ == "__main__":
    follow(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
