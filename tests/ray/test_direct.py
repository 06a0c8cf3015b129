"""Replicas on Ray Serve behind HAProxy, which talks to them itself: what clients see."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import served_replicas
from lost_replicas import REPLICA, ask
from ports import free_port
from ray_clusters import PATIENCE
from served_replicas import KEY, ReplicasClient, processes_of
from waiting import wait_until

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(900)]
_LONG_S = 240  # for what takes some seconds on a machine that is not busy
COMMAND = [str(Path(sys.executable).with_name("tidewheel")), "serve", "--distributed-executor-backend", "ray"]
OPTIONS = ["--data-parallel-size", "2", "--cpus-per-replica", "1", "--kv-cache-space", "0.1", "--api-key", KEY]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TIDEWHEEL_"))}


class Server(ReplicasClient):
    """The replicas that a command has started."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        super().__init__(url)
        self.process = process

    def is_up(self) -> bool:
        """Whether both replicas get requests from the chooser, which HAProxy finds later than the replicas."""
        try:
            places = [{self._place(session) for _ in range(2)} for session in new_sessions(5)]
        except httpx.TransportError:
            return False
        return all(len(place) == 1 for place in places) and len(set().union(*places) - {None}) == 2

    def _place(self, session: str) -> str | None:
        return self.ask("Are you there?", headers={"x-session-id": session}).headers.get(REPLICA)

    def replicas(self) -> list[psutil.Process]:
        """The processes of the replicas."""
        return processes_of(psutil.Process(self.process.pid))


def new_sessions(count: int) -> list[str]:
    return [f"session {random.random()}" for _ in range(count)]


def at_rest(check: Callable[[], object]) -> None:
    """A check of where requests go while the replicas have little to do.

    The chooser counts a request until it has looked whether that has ended. On a busy machine it looks late, and sends
    requests elsewhere after the eighth. So the check may fail, until the chooser has had time.
    """
    deadline = time.monotonic() + _LONG_S
    while True:
        try:
            check()
            return
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("ray"), free_port()
    haproxy = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "120",
    }
    environment = {**ENVIRONMENT, **PATIENCE, "RAY_AUTH_MODE": "disabled", **haproxy}
    arguments = [*COMMAND, *OPTIONS, "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(arguments, cwd=folder, env=environment) as process:
        server = Server(process, f"http://127.0.0.1:{port}")
        try:
            # Not more often: the chooser has to see meanwhile that these requests have ended.
            wait_until(lambda: process.poll() is not None or server.is_up(), _LONG_S, every_s=2)
            yield server
            process.send_signal(signal.SIGINT)
            assert process.wait(_LONG_S) == 0
        finally:
            process.kill()


def test_a_request_is_answered_as_by_one_server(server: Server) -> None:
    served_replicas.check_answers_are_those_of_one_server(server)


def test_keys_and_limits_are_those_of_the_server(server: Server) -> None:
    served_replicas.check_keys_and_limits(server)


def test_streams_are_not_buffered(server: Server) -> None:
    served_replicas.check_streams_are_not_buffered(server)


def test_a_conversation_stays_where_its_prefix_lies(server: Server) -> None:
    at_rest(lambda: served_replicas.check_conversations_stay_where_their_prefixes_lie(server))


def test_a_session_stays_at_its_replica(server: Server) -> None:
    def check() -> None:
        for session in new_sessions(4):
            assert len({ask(server.http, session)[0] for _ in range(3)}) == 1

    at_rest(check)


def test_requests_at_the_same_time_are_spread(server: Server) -> None:
    def run(number: int) -> str:
        body = {"prompt": f"Number {number} is", "max_tokens": 300, "ignore_eos": True}
        return server.http.post("/v1/completions", json=body).headers[REPLICA]

    with ThreadPoolExecutor(16) as pool:
        taken = Counter(pool.map(run, range(16)))
    assert len(taken) == 2
    assert max(taken.values()) <= 13  # 1.5 times the mean, and requests of before that are not known to have ended


@pytest.mark.parametrize("session", [b"h\xe9", b"x" * 10_000])
def test_any_session_is_answered(server: Server, session: bytes) -> None:
    served_replicas.check_any_session_is_answered(server, session)


def test_a_replica_that_dies_breaks_its_own_answers_alone(server: Server) -> None:
    placed, number = dict[str, list[str]](), 0
    while len(placed) < 2 or min(map(len, placed.values())) < 3:  # by chance
        question, number = f"session {number} that loses its replica", number + 1
        placed.setdefault(ask(server.http, question)[0], []).append(question)
    questions = [question for those in placed.values() for question in those[:3]]
    before = [ask(server.http, question, 64)[1] for question in questions]
    began = threading.Semaphore(0)

    def run(question: str) -> tuple[str, bool]:
        """The replica of a stream, and whether it came to its end."""
        body = {"prompt": question, "max_tokens": 1500, "stream": True, "ignore_eos": True}
        with server.http.stream("POST", "/v1/completions", json=body, headers={"x-session-id": question}) as response:
            assert response.status_code == 200, response.read()
            replica, lines = response.headers[REPLICA], response.iter_lines()
            next(lines)
            began.release()
            try:
                return replica, "data: [DONE]" in [*lines]
            except httpx.TransportError:
                return replica, False

    with ThreadPoolExecutor(len(questions)) as pool:
        running = [pool.submit(run, question) for question in questions]
        for _ in questions:
            assert began.acquire(timeout=60)
        os.kill(server.replicas()[0].pid, signal.SIGKILL)
        ended = [future.result() for future in running]
    (lost,) = {replica for replica, is_whole in ended if not is_whole}
    assert all(replica != lost for replica, is_whole in ended if is_whole)
    after = [ask(server.http, question, 64) for question in questions]
    assert lost not in {replica for replica, _ in after}
    assert [text for _, text in after] == before
    wait_until(lambda: len(server.replicas()) == 2)
