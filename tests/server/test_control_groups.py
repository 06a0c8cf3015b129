"""A server in real control groups keeps to them: with root on a machine whose groups may be changed."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server.conftest import TIDEWHEEL, ServerProcess

MIB = 2**20
_KV_BYTES_PER_TOKEN = 3072  # of the embedded model


def _group_of(controller: str) -> Path | None:
    """The folder of this process's version 1 group, if the hierarchy is where it usually is."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            return Path("/sys/fs/cgroup", controller, group.lstrip("/"))
    return None


class Groups:
    """Groups below this process's own, so that they can only be stricter; removed in the end."""

    def __init__(self) -> None:
        self._folders: list[Path] = []

    def make(self, controller: str, **limits: str) -> None:
        own = _group_of(controller)
        if own is None:
            pytest.skip(f"there is no version 1 hierarchy of control groups for {controller}")
        folder = own / f"tidewheel-test-{os.getpid()}"
        try:
            folder.mkdir()
            self._folders.append(folder)
            for name, value in limits.items():
                (folder / f"{controller}.{name}").write_text(value)
        except OSError as error:
            pytest.skip(f"control groups cannot be made here: {error}")

    def enter(self) -> None:
        for folder in self._folders:
            (folder / "cgroup.procs").write_text("0")

    def remove(self) -> None:
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.remove()


@contextlib.contextmanager
def serving(groups: Groups, *arguments: str) -> Iterator[ServerProcess]:
    server = ServerProcess(*arguments, preexec_fn=groups.enter)
    try:
        yield server
    finally:
        server.stop()


# A server with one processor computes 20,000 tokens.
def test_a_server_is_as_large_as_its_groups_allow(groups: Groups) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    groups.make("cpu", cfs_period_us="50000", cfs_quota_us="50000")
    groups.make("cpuset", cpus=str(cpus[-1]), mems="0")
    groups.make("memory", limit_in_bytes=str(128 * MIB))
    with serving(groups) as server:
        expected = f"in 1 thread on CPUs {cpus[-1]}; the control group allows 1 CPUs' worth of time"
        assert expected in server.log
        assert "of the control group's 0.12 GiB of memory is available" in server.log
        cache = re.search(r"KV cache ([\d.]+) GiB", server.log)
        assert cache is not None
        assert 0.02 < float(cache[1]) <= 0.06
        # More than fills the cache: all of its pages appear, and nothing is killed.
        prompts = [[100 + number] * 400 for number in range(50)]
        body = {"prompt": prompts, "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens"] * _KV_BYTES_PER_TOKEN > float(cache[1]) * 2**30
        assert server.process.poll() is None


def test_a_quota_below_all_processors_means_fewer_threads(groups: Groups) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")
    groups.make("cpu", cfs_period_us="100000", cfs_quota_us="150000")
    with serving(groups) as server:
        assert "in 1 thread on CPUs" in server.log
        assert "allows 1.5 CPUs' worth of time" in server.log


def test_what_the_group_cannot_hold_is_refused(groups: Groups) -> None:
    groups.make("memory", limit_in_bytes=str(256 * MIB))
    done = subprocess.run(
        [*TIDEWHEEL, "serve", "--port", "0", "--kv-cache-space", "0.5"],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=groups.enter,
    )
    assert done.returncode == 1
    assert "do not fit into the 0.25 GiB of memory that its control group allows this process" in done.stderr
    assert "lower --kv-cache-space" in done.stderr
