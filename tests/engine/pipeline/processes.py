"""The processes of stages, from outside."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from waiting import wait_until


def children_of(pid: int) -> list[int]:
    """The processes of stages that a process has started, in order."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z" and b"engine.loading.stages.process" in command:
            found.append(int(path.parent.name))
    return sorted(found)


def cpu_time(pid: int) -> float:
    """Seconds that a process has computed; very many once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kill_soon(stage: int) -> threading.Thread:
    """Kill a stage of this process when it has run for a moment."""
    pid = children_of(os.getpid())[stage]

    def run() -> None:
        before = cpu_time(pid)
        wait_until(lambda: cpu_time(pid) > before + 0.05)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=run)
    thread.start()
    return thread
