"""How much memory this process may use, by the machine and by its control groups."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from ..declaring.record import record
from .cgroup import memory_limits

_ROOT = Path("/")
_M_ARENA_MAX = -8  # of glibc's malloc.h


@record(frozen=True, slots=True)
class Memory:
    """Amounts in bytes. None if the system does not say, or if no control group limits this process.

    `available` is what this process may still take: what the machine has available, or what one of the process's
    control groups has left, whichever is smallest. Page cache that can be dropped counts as available. `cgroup_limit`
    and `cgroup_used` belong to the group with the lowest limit.

    It `is_shared` if it is what several models may take together, and not what the system has.
    """

    total: int | None
    available: int | None
    cgroup_limit: int | None
    cgroup_used: int | None
    is_shared: bool = False

    @classmethod
    def of_budget(cls, num_bytes: int) -> Memory:
        """What several models may take together."""
        return cls(num_bytes, num_bytes, None, None, is_shared=True)

    @property
    def ceiling(self) -> int | None:
        """What this process could use if it were alone."""
        return self.total if self.cgroup_limit is None else self.cgroup_limit


def read_memory(root: Path = _ROOT) -> Memory:
    """The memory that this process may use. `root` is where `/proc` and `/sys` are."""
    machine = dict(_meminfo(root))
    if not machine and sys.platform == "darwin":
        machine = dict(_mac_memory())
    total, available = machine.get("MemTotal"), machine.get("MemAvailable")
    # Version 1 writes "no limit" as a number far above any machine's memory.
    groups = [group for group in memory_limits(root) if total is None or group.limit < total]
    lowest = min(groups, key=lambda group: group.limit, default=None)
    left = [group.limit - group.used for group in groups] + ([] if available is None else [available])
    return Memory(
        total=total,
        available=max(min(left), 0) if left else None,
        cgroup_limit=lowest.limit if lowest else None,
        cgroup_used=lowest.used if lowest else None,
    )


def available_memory_bytes() -> int | None:
    """`Memory.available` of this machine."""
    return read_memory().available


def _meminfo(root: Path) -> Iterator[tuple[str, int]]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            yield name, int(value.split()[0]) * 1024


def _mac_memory() -> Iterator[tuple[str, int]]:
    import subprocess

    page = os.sysconf("SC_PAGESIZE")
    yield "MemTotal", os.sysconf("SC_PHYS_PAGES") * page
    try:
        said = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return
    pages = {name: count.strip(" .") for name, _, count in (line.partition(":") for line in said.splitlines())}
    # What may be dropped or written elsewhere, beside what is free.
    kinds = [pages.get(f"Pages {kind}", "") for kind in ("free", "inactive", "speculative")]
    yield "MemAvailable", sum(int(count) for count in kinds if count.isdigit()) * page


def resident_bytes() -> int:
    """The resident memory of this process, shared pages included; 0 if the system does not say."""
    try:
        return _statm_bytes(1)
    except OSError:
        return 0


def address_space_bytes() -> int:
    """The address space of this process, which RLIMIT_AS bounds. Raises OSError if the system does not say."""
    return _statm_bytes(0)


def limit_address_space(num_bytes: int) -> None:
    """Let this process have no larger address space. macOS enforces no such limit, and refuses to set one."""
    if sys.platform != "darwin":
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _statm_bytes(field: int) -> int:
    return int((_ROOT / "proc/self/statm").read_text().split()[field]) * os.sysconf("SC_PAGESIZE")


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def heap_bytes() -> int:
    """How many bytes are allocated and not freed; 0 if the C library is not a glibc that can tell."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return int(info.uordblks) + int(info.hblkhd)


def release_free_memory() -> None:
    """Give freed memory back to the system once. Otherwise the C library keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def share_heaps() -> None:
    """Let all threads allocate from two heaps, unless the environment says how many. To be called before they start.

    Otherwise glibc gives each thread its own, up to eight for each core, and what is free in one is of no use to
    others: under a mix of requests, the process took 1.8 times as much memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, 2)
