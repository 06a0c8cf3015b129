"""The CPU time and memory that control groups, of version 1 or 2, allow this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ..declaring.record import record

_ROOT = Path("/")


@record(frozen=True, slots=True)
class MemoryLimit:
    """Memory of one control group, in bytes. `used` does not count page cache that can be dropped."""

    limit: int
    used: int


def cpu_quota(root: Path = _ROOT) -> float | None:
    """The CPU time that the strictest group allows, in CPUs. None without a limit. `root` has `/proc` and `/sys`."""
    limits = []
    for folder, is_version_2 in _groups("cpu", root):
        if is_version_2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):  # "max" and "-1" are no limits
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_limits(root: Path = _ROOT) -> Iterator[MemoryLimit]:
    """The limits of the process's group and of its parents. `root` has `/proc` and `/sys`."""
    for folder, is_version_2 in _groups("memory", root):
        if is_version_2:
            # Above memory.high nothing is killed, but everything gets slow.
            limits = [_text(folder / "memory.max"), _text(folder / "memory.high")]
            used, cache = _text(folder / "memory.current"), "inactive_file"
        else:
            limits = [_text(folder / "memory.limit_in_bytes")]
            used, cache = _text(folder / "memory.usage_in_bytes"), "total_inactive_file"
        numbers = [int(limit) for limit in limits if limit.isdigit()]
        if numbers:
            droppable = re.search(rf"^{cache} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            taken = (int(used) if used.isdigit() else 0) - (int(droppable[1]) if droppable else 0)
            yield MemoryLimit(min(numbers), max(taken, 0))


@record(frozen=True, slots=True)
class _Mount:
    root: PurePosixPath  # the group that is mounted at `point`
    point: Path
    is_version_2: bool
    controllers: frozenset[str]  # version 1's, among other mount options


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    # The folders of the process's group and of its parents, as far up as mounted, and whether they are version 2.
    mounts = list(_mounts(root))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, group = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        seen = [m for m in mounts if (controller in m.controllers if names else m.is_version_2)]
        placed = [(m.point, inner) for m in seen if (inner := _below(PurePosixPath(group), m.root)) is not None]
        # A group that this namespace cannot see is somewhere below the mounted one.
        for point, inner in placed or [(m.point, PurePosixPath()) for m in seen]:
            for path in (inner, *inner.parents):
                yield point / path, not names


def _mounts(root: Path) -> Iterator[_Mount]:
    # proc(5): ID, parent, device, root, mount point, options, any number of fields, "-", type, source, options.
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mounted, _, system = line.partition(" - ")
        kind, *_, options = system.split(" ")
        if kind in ("cgroup", "cgroup2"):
            group, point = (_unescaped(field) for field in mounted.split(" ")[3:5])
            controllers = options.split(",") if kind == "cgroup" else ()
            yield _Mount(PurePosixPath(group), root / point.lstrip("/"), kind == "cgroup2", frozenset(controllers))


def _below(group: PurePosixPath, parent: PurePosixPath) -> PurePosixPath | None:
    if ".." in (*group.parts, *parent.parts) or not group.is_relative_to(parent):
        return None
    return group.relative_to(parent)


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape").strip()
    except OSError:
        return ""
