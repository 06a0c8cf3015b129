"""Replicas on the nodes of a cluster that lose a node, or the head while Redis keeps what it knew."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from lost_replicas import ask, lose_a_replica, stream
from ports import lasting_port
from ray_clusters import SERVE_ENVIRONMENT, start_node
from server.redis_servers import redis_server
from waiting import wait_until

# An attempt to start a node may fail after half a minute on a busy machine, so these take minutes there.
pytestmark = [pytest.mark.sweep, pytest.mark.timeout(900)]
_LONG_S = 120  # for replicas to start there
_ENVIRONMENT = {
    **SERVE_ENVIRONMENT,
    "RAY_external_storage_namespace": "tidewheel",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}
# Other tests' replicas may have the machine's cores.
_OPTIONS = {"num_replicas": 2, "bind_cores": False, "kv_cache_space": 0.1, "health_check_period_s": 1}
# By a process of its own, as one that is connected to the head ends with it.
_DEPLOY = f"""
import ray, sys, tidewheel.ray
from ray import serve
from ray.serve.context import _get_global_client

ray.init(address=sys.argv[1], log_to_driver=False)
serve.start(proxy_location="EveryNode", http_options={{"host": "127.0.0.1", "port": int(sys.argv[2])}})
serve.run(tidewheel.ray.app({_OPTIONS!r}), name="tidewheel", route_prefix="/")
_get_global_client().wait_for_proxies_serving()
"""


class Node:
    """A node of the cluster, and a client of the proxy on it."""

    def __init__(self, cluster: Any) -> None:
        port = lasting_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
        variables = {"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(port)}
        self._cluster, self._node = cluster, start_node(cluster, num_cpus=1, env_vars=variables)

    @property
    def replicas(self) -> set[int]:
        """The processes of those that are on it."""
        return {process.pid for process in _processes(self._node) if "ServeReplica" in _command_line(process)}

    def serves(self) -> bool:
        """Whether its proxy answers."""
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """As if it lost its power."""
        _kill(self._cluster, self._node)


class Nodes:
    """A cluster whose head has no replicas, and keeps what it knows in Redis."""

    def __init__(self, cluster: Any) -> None:
        self._cluster, self._port = cluster, lasting_port()
        self.start_head()
        self.all = [self.add() for _ in range(2)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def start_head(self) -> None:
        start_node(self._cluster, num_cpus=0, gcs_server_port=self._port, include_dashboard=False)

    def kill_head(self) -> None:
        _kill(self._cluster, self._cluster.head_node)

    def add(self) -> Node:
        return Node(self._cluster)


def _processes(node: Any) -> list[psutil.Process]:
    found = []
    for started in [one for several in node.all_processes.values() for one in several]:
        with suppress(psutil.Error):
            process = psutil.Process(started.process.pid)
            found += [process, *process.children(recursive=True)]
    return found


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _kill(cluster: Any, node: Any) -> None:
    for process in _processes(node):
        with suppress(psutil.Error):
            process.kill()
    cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    before, folder = dict(os.environ), Path.cwd()
    with redis_server(real=True) as url:
        os.environ.update({**_ENVIRONMENT, "RAY_REDIS_ADDRESS": url.removeprefix("redis://").removesuffix("/0")})
        os.environ.pop("RAY_ADDRESS", None)
        os.chdir(tmp_path_factory.mktemp("ray"))  # Ray's workers import from the folder that it is started in
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            nodes = Nodes(cluster)
            deployed = [sys.executable, "-c", _DEPLOY, nodes.address, str(lasting_port())]
            subprocess.run(deployed, check=True, timeout=300)
            for node in nodes.all:
                wait_until(node.serves, _LONG_S)
            yield nodes
        finally:
            try:
                for node in cluster.list_all_nodes():
                    _kill(cluster, node)
                cluster.shutdown()
            finally:
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(before)


def names(http: httpx.Client) -> set[str]:
    """The names of the replicas that answer."""
    asked = [f"session {random.random()}" for _ in range(16)]
    return {ask(http, session)[0] for session in asked}


def test_a_lost_node_breaks_its_own_streams_and_its_replica_comes_up_elsewhere(nodes: Nodes) -> None:
    spare = nodes.add()
    lost_node, node = nodes.all
    nodes.all = [node, spare]
    lost = lose_a_replica(node.http, lost_node.kill, streams=16)
    wait_until(lambda: spare.replicas, _LONG_S)
    wait_until(spare.serves, _LONG_S)
    for one in nodes.all:
        wait_until(lambda http=one.http: len(names(http)) == 2, _LONG_S)
        assert lost not in names(one.http)
        wait_until(lambda http=one.http: "tidewheel:replicas 2" in http.get("/metrics").text.splitlines())


def test_replicas_serve_while_the_head_is_gone_and_after_it(nodes: Nodes) -> None:
    questions, length = [f"Tell me a story of {i} pages" for i in range(4)], 1500
    clients = [one.http for one in nodes.all] * 2
    (killed,), (kept,) = (one.replicas for one in nodes.all)
    began = threading.Semaphore(0)
    with ThreadPoolExecutor(len(questions)) as pool:
        whole = [*pool.map(lambda http, question: stream(http, question, length), clients, questions)]
        running = [pool.submit(stream, *of, length, began) for of in zip(clients, questions, strict=True)]
        for _ in questions:
            assert began.acquire(timeout=60)
        nodes.kill_head()
        assert not any(future.done() for future in running)
        answers = [future.result() for future in running]
        assert [len(names(one.http)) for one in nodes.all] == [2, 2]  # the head is still gone
    assert all(answer.error is None for answer in answers)
    assert [answer.text for answer in answers] == [answer.text for answer in whole]

    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(killed))
    assert [len(names(one.http)) for one in nodes.all] == [1, 1]

    nodes.start_head()
    wait_until(lambda: all(len(one.replicas) == 1 for one in nodes.all), _LONG_S)  # the head has started one
    assert nodes.all[1].replicas == {kept}
    for one in nodes.all:
        wait_until(lambda http=one.http: len(names(http)) == 2, _LONG_S)
