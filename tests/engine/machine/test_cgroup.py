"""Limits of control groups, in trees as kernels, container engines and systemd make them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.devices.cpu.groups import default_threads
from tidewheel.engine.machine.cgroup import MemoryLimit, cpu_quota, memory_limits
from tidewheel.engine.machine.memory import read_memory

MIB = 2**20
UNLIMITED_V1 = 9223372036854771712  # what version 1 writes


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def escaped(path: str) -> str:
    return path.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")


@dataclass(frozen=True)
class Level:
    """One group's files; None is a file that is not there. `limit`, `high` and `quota` -1 are no limit."""

    limit: int | None
    high: int | None
    used: int | None
    droppable: int | None
    quota: int | None
    period: int | None

    def files(self, *, version_2: bool) -> dict[str, str]:
        if version_2:
            cpu = None if self.quota is None or self.period is None else f"{self._max(self.quota)} {self.period}"
            files = {
                "memory.max": self._max(self.limit),
                "memory.high": self._max(self.high),
                "memory.current": self.used,
                "memory.stat": self._stat("inactive_file"),
                "cpu.max": cpu,
            }
        else:
            files = {
                "memory.limit_in_bytes": UNLIMITED_V1 if self.limit == -1 else self.limit,
                "memory.usage_in_bytes": self.used,
                "memory.stat": self._stat("total_inactive_file"),
                "cpu.cfs_quota_us": self.quota,
                "cpu.cfs_period_us": self.period,
            }
        return {name: f"{content}\n" for name, content in files.items() if content is not None}

    def memory(self, *, version_2: bool) -> MemoryLimit | None:
        limits = [self.limit, self.high] if version_2 else [UNLIMITED_V1 if self.limit == -1 else self.limit]
        numbers = [limit for limit in limits if limit is not None and limit != -1]
        taken = max((self.used or 0) - (self.droppable or 0), 0)
        return MemoryLimit(min(numbers), taken) if numbers else None

    def cpus(self) -> float | None:
        if self.quota is None or self.quota <= 0 or not self.period:
            return None
        return self.quota / self.period

    @staticmethod
    def _max(value: int | None) -> str | int | None:
        return "max" if value == -1 else value

    def _stat(self, cache: str) -> str | None:
        return None if self.droppable is None else f"anon 7\n{cache} {self.droppable}\nactive_file 9"


amounts = st.none() | st.just(-1) | st.integers(0, 3) | st.integers(4, 8 * MIB)
levels = st.builds(
    Level,
    limit=amounts,
    high=amounts,
    used=st.none() | st.integers(0, 8 * MIB),
    droppable=st.none() | st.integers(0, 8 * MIB),
    quota=st.none() | st.just(-1) | st.integers(1, 400_000),
    period=st.none() | st.integers(1_000, 200_000),
)
names = st.sampled_from(["docker", "kubepods.slice", "pod with a space", "back\\slash", "a", "0", "ünï", "..x"])


@settings(deadline=None, max_examples=30)
@given(
    path=st.lists(st.tuples(names, levels), max_size=4),
    top=levels,
    hidden=st.integers(0, 4),
    version_2=st.booleans(),
    point=st.sampled_from(["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/mnt/control groups"]),
    both=st.booleans(),
)
def test_the_strictest_group_that_can_be_seen_decides(
    path: list[tuple[str, Level]], top: Level, hidden: int, version_2: bool, point: str, both: bool
) -> None:
    """`hidden` of the outermost groups lie above what is mounted, as in a container."""
    hidden = min(hidden, len(path))
    group = "".join(f"/{name}" for name, _ in path) or "/"
    mounted = "".join(f"/{name}" for name, _ in path[:hidden]) or "/"
    seen = [top if hidden == 0 else path[hidden - 1][1], *(level for _, level in path[hidden:])]
    controllers = [""] if version_2 else ["cpu,cpuacct", "memory"]
    points = {names: point if version_2 else f"{point}/{names}" for names in controllers}
    lines = ["22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw"]
    for number, (controller, where) in enumerate(points.items()):
        kind = "cgroup2 cgroup2 rw,nsdelegate" if version_2 else f"cgroup cgroup rw,{controller}"
        lines.append(f"{30 + number} 22 0:2{number} {escaped(mounted)} {escaped(where)} rw,nosuid shared:9 - {kind}")
    groups = [f"{i}:{controller}:{group}" for i, controller in enumerate(controllers)]
    if both:  # systemd's hybrid layout has the other version beside, without these controllers
        lines.append(
            "40 22 0:40 / /sys/fs/cgroup/other rw - " + ("cgroup - rw,name=systemd" if version_2 else "cgroup2 - rw")
        )
        groups.append(f"1:name=systemd:{group}" if version_2 else f"0::{group}")
    with tempfile.TemporaryDirectory() as folder:
        root = tree(Path(folder), {"proc/self/cgroup": "\n".join(groups), "proc/self/mountinfo": "\n".join(lines)})
        for where in points.values():
            inside = where
            for name, level in [("", seen[0]), *zip((name for name, _ in path[hidden:]), seen[1:], strict=True)]:
                inside = f"{inside}/{name}".rstrip("/")
                tree(root, {f"{inside}/{file}": text for file, text in level.files(version_2=version_2).items()})
        quotas = [quota for level in seen if (quota := level.cpus()) is not None]
        assert cpu_quota(root) == min(quotas, default=None)
        limits = [limit for level in reversed(seen) if (limit := level.memory(version_2=version_2)) is not None]
        assert list(memory_limits(root)) == limits
        assert read_memory(root).available == min((max(m.limit - m.used, 0) for m in limits), default=None)


def test_a_group_out_of_sight_lies_below_what_is_mounted(tmp_path: Path) -> None:
    mounts = "31 1 0:1 /../.. /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
    root = tree(
        tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": mounts, "sys/fs/cgroup/cpu.max": "5 2\n"}
    )
    assert cpu_quota(root) == 2.5


def test_the_group_of_another_container_does_not_count(tmp_path: Path) -> None:
    mounts = (
        "31 1 0:1 /docker/mine /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
        "32 1 0:1 /docker/other /host/other rw - cgroup2 cgroup rw\n"
    )
    files = {"sys/fs/cgroup/cpu.max": "max 100000\n", "host/other/cpu.max": "1 1\n"}
    root = tree(tmp_path, {"proc/self/cgroup": "0::/docker/mine\n", "proc/self/mountinfo": mounts, **files})
    assert cpu_quota(root) is None


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert list(memory_limits(tmp_path)) == []


@pytest.mark.parametrize(
    ("cores", "quota", "threads"),
    [(4, None, 4), (8, None, 7), (8, 2.9, 2), (8, 0.5, 1), (4, 8.0, 4), (32, 16.0, 15), (1, None, 1)],
)
def test_threads_are_what_the_quota_pays_for_and_from_eight_on_a_core_stays_free(
    cores: int, quota: float | None, threads: int
) -> None:
    assert default_threads(cores, quota) == threads
