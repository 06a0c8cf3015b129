"""How much memory this process may use: the machine's, and what its control groups leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Memory:
    """Amounts in bytes; None where the system does not say, or no control group limits this process.

    `available` is what this process may still take: the lesser of what the machine has available and what each
    control group above the process has left. Page cache that can be dropped counts as available. `cgroup_limit` and
    `cgroup_used` are those of the group with the lowest limit.
    """

    total: int | None
    available: int | None
    cgroup_limit: int | None
    cgroup_used: int | None


@dataclass(frozen=True, slots=True)
class _Group:
    limit: int
    used: int  # without page cache that can be dropped


def read_memory(root: Path = _ROOT) -> Memory:
    """What this process may use. `root` is where `/proc` and `/sys` are found."""
    machine = dict(_meminfo(root))
    total, available = machine.get("MemTotal"), machine.get("MemAvailable")
    # Version 1 writes no limit as a number far above what any machine has.
    groups = [group for group in _groups(root) if total is None or group.limit < total]
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
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            yield name, int(value.split()[0]) * 1024


def _groups(root: Path) -> Iterator[_Group]:
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, controllers, group = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            yield from _with_parents(root / "sys/fs/cgroup", group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _with_parents(mount, group, *names)


def _with_parents(mount: Path, group: str, limit_file: str, usage_file: str, cache_field: str) -> Iterator[_Group]:
    """A group and each of its parents. In a container, the mount itself is often the group."""
    inner = PurePosixPath(group.lstrip("/"))
    for folder in dict.fromkeys([mount / inner, *(mount / parent for parent in inner.parents), mount]):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is None or usage is None:
            continue
        fields = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat"))
        yield _Group(limit, usage - int(fields.get(cache_field, 0)))


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def release_free_memory() -> None:
    """Give what has been freed back to the system, for once, where the C library otherwise keeps it."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
