"""The command starts a cluster: its replicas as clients see them, one of which ends, and stages that it has room for.

The other tests of real clusters take minutes, so `make sweep` runs them.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import served_replicas
from engine.pipeline.cases import answers
from lost_replicas import REPLICA, lose_a_replica
from ports import free_port
from ray_clusters import PATIENCE
from served_replicas import KEY, ReplicasClient, command_line, processes_of
from waiting import wait_until

from tidewheel.server.options.model import DEMO_MODEL

pytestmark = pytest.mark.timeout(1200)  # where the machine has other things to do, a cluster takes minutes
COMMAND = [str(Path(sys.executable).with_name("tidewheel")), "serve"]
OPTIONS = ["--data-parallel-size", "2", "--cpus-per-replica", "1", "--kv-cache-space", "0.1", "--api-key", KEY]
OPTIONS += ["--shutdown-timeout", "1"]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TIDEWHEEL_"))},
    **PATIENCE,
    "RAY_AUTH_MODE": "disabled",
    "RAY_OVERRIDE_RESOURCES": '{"CPU": 4}',  # so that there is room for stages beside the replicas
}


class Server:
    """The command, with what it says. Its replicas all run."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.url, self._said = f"http://127.0.0.1:{port}", folder / "said"
        command = [*COMMAND, *OPTIONS, "--port", str(port)]
        with self._said.open("w") as said:
            self.process = psutil.Popen(command, cwd=folder, env=ENVIRONMENT, stderr=said)

    def is_up(self) -> bool:
        """Raises AssertionError if it has ended."""
        said = self._said.read_text("utf-8")
        assert self.process.poll() is None, said
        return "by 2 replicas of 1 cores" in said

    def replicas(self) -> list[psutil.Process]:
        """The processes of the replicas."""
        return processes_of(self.process)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The command must end as it should."""
    server = Server(tmp_path_factory.mktemp("ray"))
    try:
        wait_until(server.is_up, 600)
        yield server
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(600) == 0
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def replicas(server: Server) -> ReplicasClient:
    return ReplicasClient(server.url)


@pytest.fixture
def connected(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is connected to the command's cluster."""
    import ray

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    started = map(command_line, server.process.children(recursive=True))
    address = next(found[1] for line in started if (found := re.search(r"--gcs-address=(\S+)", line)))
    ray.init(address=address, log_to_driver=False)
    yield
    ray.shutdown()


# A cluster starts: 6 s.
def test_a_request_is_answered_as_by_one_server(replicas: ReplicasClient) -> None:
    served_replicas.check_answers_are_those_of_one_server(replicas)


def test_keys_and_limits_are_those_of_the_server(replicas: ReplicasClient) -> None:
    served_replicas.check_keys_and_limits(replicas)


def test_streams_are_not_buffered(replicas: ReplicasClient) -> None:
    served_replicas.check_streams_are_not_buffered(replicas)


def test_no_two_replicas_share_a_core(server: Server, replicas: ReplicasClient) -> None:
    cores = [process.cpu_affinity() for process in server.replicas()]
    assert len(cores) == 2
    assert all(len(own) == 1 for own in cores)
    assert cores[0] != cores[1]


def test_a_session_stays_at_its_replica(replicas: ReplicasClient) -> None:
    for i in range(4):
        header = {"x-session-id": f"session {i}"}
        assert len({replicas.ask(f"{i} {j}", headers=header).headers[REPLICA] for j in range(4)}) == 1


@pytest.mark.parametrize("session", [b"h\xe9", b"x" * 30_000])
def test_any_session_is_answered(replicas: ReplicasClient, session: bytes) -> None:
    served_replicas.check_any_session_is_answered(replicas, session)


def test_what_one_replica_would_have_alone_is_refused(replicas: ReplicasClient) -> None:
    stored = replicas.http.post("/v1/responses", json={"input": "Hello", "store": True, "max_output_tokens": 4})
    assert stored.status_code == 400
    assert "keeps no responses" in stored.json()["error"]["message"]
    answered = replicas.http.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 4})
    assert (answered.status_code, answered.json()["store"]) == (200, False)
    assert replicas.http.get("/v1/files").status_code == 404
    assert replicas.http.post("/reset_prefix_cache").status_code == 403
    assert replicas.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"}).status_code == 403


# Two stages start, and import Ray: 2 s each.
def test_stages_on_nodes_give_the_bits_of_one_process(connected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidewheel.ray import stages

    # The replicas have the machine's cores.
    monkeypatch.setattr(stages, "RayHost", partial(stages.RayHost, bind_cores=False))
    placed: dict[str, Any] = {"distributed_executor_backend": "ray", "cpus_per_replica": 1}
    assert answers(DEMO_MODEL, pipeline_parallel_size=2, **placed) == answers(DEMO_MODEL)


def test_a_replica_that_dies_breaks_its_own_streams_alone(server: Server, replicas: ReplicasClient) -> None:
    replica = server.replicas()[0]  # before they begin, and answers are long: calls to the cluster may take seconds
    lose_a_replica(replicas.http, replica.kill, streams=16, length=300)
