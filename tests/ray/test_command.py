"""`tidewheel serve --distributed-executor-backend ray`: what it says where replicas cannot run, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from ports import free_port
from ray_clusters import PATIENCE
from waiting import wait_until

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

# test_cluster.py has a command that starts replicas, and test_room.py what it says where there is no room.
pytestmark = [pytest.mark.sweep, pytest.mark.timeout(1200)]
_LONG_S = 300  # for what takes seconds on a machine that is not busy
COMMAND = [str(Path(sys.executable).with_name("tidewheel")), "serve", "--kv-cache-space", "0.1"]
ON_RAY = ["--distributed-executor-backend", "ray"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TIDEWHEEL_"))}


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command, variables = (
        [*COMMAND, *ON_RAY, *arguments],
        {**ENVIRONMENT, **PATIENCE, "RAY_AUTH_MODE": "disabled", **environment},
    )
    return subprocess.Popen(command, cwd=folder, env=variables, stderr=subprocess.PIPE, text=True)


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    with start(folder, *arguments, **environment) as process:
        try:
            _, said = process.communicate(timeout=_LONG_S)
        finally:
            process.kill()
    return process.returncode, said


@pytest.mark.parametrize(
    ("what", "flag"), [("replicas", "--data-parallel-size"), ("stages", "--pipeline-parallel-size")]
)
def test_what_a_machine_has_no_room_for_is_refused(what: str, flag: str, tmp_path: Path) -> None:
    code, said = run(tmp_path, flag, "1000", "--port", str(free_port()))
    assert code == 1
    assert f"there is no room for 1000 {what} of 1 cores" in said
    assert f"lower {flag} or --cpus-per-replica" in said


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A node with one core."""
    for name in ("RAY_ADDRESS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.chdir(tmp_path)  # Ray's workers import from the folder that it is started in
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20)
        yield cluster
    finally:
        cluster.shutdown()


def test_a_cluster_has_one_such_application_at_one_address(cluster: Cluster, tmp_path: Path) -> None:
    port, there = str(free_port()), {"RAY_ADDRESS": cluster.address}
    url = f"http://127.0.0.1:{port}/health"
    options = ["--port", port, "--cpus-per-replica", "1"]

    def is_served() -> bool:
        try:
            return httpx.get(url, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    with start(tmp_path, *options, **there) as first:
        try:
            wait_until(lambda: is_served() or first.poll() is not None, _LONG_S)
            code, said = run(tmp_path, *options, **there)
            assert (code, "the cluster has an application tidewheel already" in said) == (1, True), said
            code, said = run(tmp_path, "--port", str(free_port()), **there)
            refused = f"--port cannot be used: Serve runs in this cluster already, on 127.0.0.1:{port}"
            assert (code, refused in said) == (1, True), said
            assert is_served()
            first.terminate()
            first.communicate(timeout=_LONG_S)
            assert first.returncode == 0
            assert not is_served()
        finally:
            first.kill()
    with start(tmp_path, *options, "--data-parallel-size", "2", **there) as waiting:
        try:
            wait_until(lambda: is_served() or waiting.poll() is not None, _LONG_S)  # by the one that there is room for
            waiting.send_signal(signal.SIGINT)
            waiting.communicate(timeout=_LONG_S)
            assert waiting.returncode == 0
        finally:
            waiting.kill()
    code, said = run(tmp_path, *options, "--model", str(tmp_path / "nothing"), **there)
    assert (code, "the replicas cannot be started: " in said) == (1, True), said


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, said = run(tmp_path, "--port", str(port))
    assert (code, f"Serve's proxies cannot listen on 127.0.0.1:{port}" in said) == (1, True), said
