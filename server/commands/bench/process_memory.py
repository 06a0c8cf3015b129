"""The memory that a process has resident, and the most that it has had."""

from __future__ import annotations

from pathlib import Path

_RESET_PEAK = "5"  # see /proc/PID/clear_refs in proc(5)


def peak_bytes(pid: int | None = None) -> int | None:
    """A process's peak resident set (VmHWM) in bytes; by default this one's. None where the system does not say.

    It counts pages of mapped files, as a checkpoint's are while it is read.
    """
    return _status_bytes(pid, "VmHWM")


def resident_bytes(pid: int | None = None) -> int | None:
    """A process's resident set (VmRSS) in bytes; by default this one's. None where the system does not say."""
    return _status_bytes(pid, "VmRSS")


class OwnPeak:
    """This process's peak, without what is used between `pause` and `resume`, if the kernel lets it be reset."""

    def __init__(self) -> None:
        self._before = 0

    def pause(self) -> None:
        """Remember the peak so far."""
        self._before = self.bytes or 0

    def resume(self) -> None:
        """Forget what has been used since `pause`."""
        try:
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        except OSError:
            return  # some sandboxes forbid it: the peak then covers everything

    @property
    def bytes(self) -> int | None:
        """The peak in bytes."""
        now = peak_bytes()
        return None if now is None else max(now, self._before)


def _status_bytes(pid: int | None, field: str) -> int | None:
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None
