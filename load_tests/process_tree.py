"""A server's process and all of its descendants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def processes(pid: int) -> Iterator[int]:
    """The process and all of its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # it has just ended
            continue
        for child in children:
            yield from processes(int(child))


def memory_mib(pid: int) -> float:
    """Resident memory of the process and all of its descendants; shared memory counts once."""
    total = 0
    for each in processes(pid):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024
