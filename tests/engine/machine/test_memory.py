"""How much memory is left, with and without control groups."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tidewheel.engine.machine.memory import Memory, available_memory_bytes, read_memory

MIB = 2**20
MOUNT = "31 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    plain = {"proc/meminfo": "MemTotal: 8192 kB\nMemAvailable: 4096 kB\n", "proc/self/mountinfo": MOUNT}
    for name, content in {**plain, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert read_memory(machine(tmp_path, {})) == Memory(8 * MIB, 4 * MIB, None, None)


def test_every_parent_counts_and_droppable_cache_is_available(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pods/mine\n",
            "sys/fs/cgroup/pods/mine/memory.max": "max\n",
            "sys/fs/cgroup/pods/mine/memory.current": "100\n",
            "sys/fs/cgroup/pods/memory.max": f"{3 * MIB}\n",
            "sys/fs/cgroup/pods/memory.current": f"{2 * MIB}\n",
            "sys/fs/cgroup/pods/memory.stat": f"anon 5\ninactive_file {MIB}\n",
        },
    )
    assert read_memory(root) == Memory(8 * MIB, 2 * MIB, 3 * MIB, MIB)
    assert read_memory(root).ceiling == 3 * MIB


def test_a_limit_above_what_the_machine_has_is_none(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{9 * MIB}\n"}
    memory = read_memory(machine(tmp_path, files))
    assert memory == Memory(8 * MIB, 4 * MIB, None, None)
    assert memory.ceiling == 8 * MIB


def test_an_overdrawn_group_has_nothing_left(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "5\n", "sys/fs/cgroup/memory.current": "9\n", "proc/self/cgroup": "0::/\n"}
    assert read_memory(machine(tmp_path, files)).available == 0


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert read_memory(tmp_path) == Memory(None, None, None, None)
    assert (available_memory_bytes() or 0) > MIB


# As macOS prints it: pages, of which those beside the fourth can be had.
_VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                    5.
Pages active:                              90210.
Pages inactive:                               40.
Pages speculative:                           300.
Pages wired down:                          70123.
"Translation faults":                   12345678.
"""


def test_a_mac_says_it_by_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "vm_stat"
    command.write_text(f"#!/bin/sh\nprintf '%s' '{_VM_STAT}'\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("PATH", str(tmp_path))
    page = os.sysconf("SC_PAGESIZE")
    assert read_memory(tmp_path) == Memory(os.sysconf("SC_PHYS_PAGES") * page, 345 * page, None, None)
    command.unlink()
    assert read_memory(tmp_path).available is None


# Eight threads that allocate at the same time; then glibc says what heaps there are.
_HEAPS = """
import ctypes, threading
from tidewheel.engine.machine.memory import share_heaps
share_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
meet = threading.Barrier(8)
def allocate():
    meet.wait()
    libc.malloc(5000)
    meet.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fdopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, file)
libc.fflush(file)
"""


@pytest.mark.parametrize(("asked", "heaps"), [(None, 2), ("4", 4)])
def test_threads_share_two_heaps_or_as_many_as_the_operator_says(asked: str | None, heaps: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    environment |= {} if asked is None else {"MALLOC_ARENA_MAX": asked}
    told = subprocess.run([sys.executable, "-c", _HEAPS], env=environment, capture_output=True, text=True, check=True)
    assert len(re.findall(r"<heap nr=", told.stdout)) == heaps
