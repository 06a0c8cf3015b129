"""Cores of a node that a single replica computes on.

Ray counts cores and does not say which. So replicas of a node agree among themselves: a core belongs to the replica
that holds the lock on its file. The kernel frees the lock when a replica ends, in any way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tidewheel._native import topology
from tidewheel.engine.errors import TidewheelError

_WAIT_S = 30.0  # for the cores of a replica that is ending
_RETRY_S = 0.2


class ClaimedCores:
    """Cores that belong to this process until it ends or `release` is called."""

    def __init__(self, cpus: Sequence[int], locks: Sequence[int]) -> None:
        self.cpus = tuple(sorted(cpus))
        self._locks = list(locks)

    def bind(self) -> None:
        """Restrict all threads of this process, and those that they start, to these cores."""
        if not hasattr(os, "sched_setaffinity"):  # macOS places threads itself
            return
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), self.cpus)

    def release(self) -> None:
        """Let others have the cores."""
        while self._locks:
            os.close(self._locks.pop())


def claim_cores(
    count: int, folder: Path | None = None, *, wait_s: float = _WAIT_S, available: Sequence[int] | None = None
) -> ClaimedCores:
    """Take `count` cores of `available`, by default those that this process may use, that no other process has claimed.

    Hyperthreads of one core, and cores of one NUMA node, are taken together where they can be. Raises TidewheelError if
    `count` have not become free within `wait_s` seconds.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"tidewheel-cores-{os.getuid()}"
    cpus = _by_closeness(usable_cpus() if available is None else available)
    if count > len(cpus):
        raise TidewheelError(
            f"a replica was given {count} CPUs (num_cpus), but this process may use only {len(cpus)} on this node"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise TidewheelError(f"{folder} belongs to another user: remove it, so that replicas can share out cores there")
    deadline = time.monotonic() + wait_s
    while True:
        claimed = _try_claim(cpus, count, folder)
        if claimed is not None:
            return claimed
        if time.monotonic() >= deadline:
            raise TidewheelError(
                f"a replica was given {count} CPUs (num_cpus), but fewer of this node's {len(cpus)} are free: other "
                "replicas use the rest. Start Ray with no more --num-cpus than the node has, or set bind_cores=false "
                "to let replicas share cores"
            )
        time.sleep(_RETRY_S)


def _try_claim(cpus: Sequence[int], count: int, folder: Path) -> ClaimedCores | None:
    """One process at a time, because two could each hold half of the cores that both need."""
    locks: dict[int, int] = {}
    with _locked(folder / "all"):
        for cpu in cpus:
            lock = _lock(folder / f"cpu-{cpu}", fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is not None:
                locks[cpu] = lock
            if len(locks) == count:
                return ClaimedCores([*locks], [*locks.values()])
    for lock in locks.values():
        os.close(lock)
    return None


def _lock(path: Path, how: int) -> int | None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        os.close(file)
        return None
    return file


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = _lock(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def usable_cpus() -> list[int]:
    """The CPUs that this thread may use, in order."""
    return sorted(place["cpu"] for place in topology()["processors"])


def _by_closeness(cpus: Sequence[int]) -> list[int]:
    """CPUs in an order in which neighbours share a core, then a NUMA node."""
    places = {place["cpu"]: (place["numa_node"], place["core"]) for place in topology()["processors"]}
    return sorted(cpus, key=lambda cpu: (*places.get(cpu, (0, 0)), cpu))
