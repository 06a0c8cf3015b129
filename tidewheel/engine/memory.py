"""How much memory this process may still use: the machine's, and what its control groups leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def available_memory_bytes(root: Path = _ROOT) -> int | None:
    """The lesser of the machine's available memory and what each control group above this process has left.

    Page cache that can be dropped counts as available. None where the system does not say. `root` is where `/proc`
    and `/sys` are found.
    """
    amounts = [*_machine(root), *_control_groups(root)]
    return max(min(amounts), 0) if amounts else None


def _machine(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _control_groups(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, controllers, group = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            yield from _left(root / "sys/fs/cgroup", group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            yield from _left(mount, group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left(mount: Path, group: str, limit_file: str, usage_file: str, cache_field: str) -> Iterator[int]:
    """What is left in a group and in each of its parents. In a container, the mount itself is often the group."""
    inner = PurePosixPath(group.lstrip("/"))
    for folder in dict.fromkeys([mount / inner, *(mount / parent for parent in inner.parents), mount]):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is None or usage is None:
            continue
        fields = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat"))
        yield limit - usage + int(fields.get(cache_field, 0))


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
