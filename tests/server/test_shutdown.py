"""SIGTERM: answers that run may finish, for a while, and those that may not are told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import TIDEWHEEL

SCRIPT = Path(__file__).with_name("scripted_engine.py")
StartProcess = Callable[..., tuple[subprocess.Popen[str], httpx.Client]]


@pytest.fixture
def start_process() -> Iterator[StartProcess]:
    """Starts `tidewheel serve` around a scripted engine that takes 10 ms a token."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[str], httpx.Client]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--port", str(port), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        processes.append(process)
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False)
        deadline = time.monotonic() + 30
        while True:
            try:
                assert client.get("/health").status_code == 200
                return process, client
            except httpx.ConnectError:
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.02)

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def start_stream(client: httpx.Client, prompt: str) -> tuple[threading.Thread, list[str]]:
    """Reads a stream in a thread, from its first event on; the lines so far are in the list."""
    lines: list[str] = []
    started = threading.Event()

    def read() -> None:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 8000, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                lines.append(line)
                started.set()
            started.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert started.wait(20)
    return thread, lines


def test_running_answers_finish(start_process: StartProcess) -> None:
    process, client = start_process()
    thread, lines = start_stream(client, "SAY(" + "long " * 20 + ")YAS")
    process.send_signal(signal.SIGTERM)
    thread.join(20)
    assert '"finish_reason":"stop"' in "".join(lines)
    assert "data: [DONE]" in lines
    assert process.wait(20) == 0
    with pytest.raises(httpx.ConnectError):
        client.get("/health")


def test_new_connections_are_refused_while_it_drains(start_process: StartProcess) -> None:
    process, client = start_process()
    thread, _ = start_stream(client, "SAY(" + "long " * 40 + ")YAS")
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 20
    with pytest.raises(httpx.TransportError):  # noqa: PT012 - how soon it stops listening is up to it
        while time.monotonic() < deadline:
            httpx.get(f"{client.base_url}/health", trust_env=False)
            time.sleep(0.01)
    thread.join(20)
    assert process.wait(20) == 0


@pytest.mark.parametrize("timeout", ["0", "0.3"])
def test_answers_that_take_too_long_end_with_an_error_event(start_process: StartProcess, timeout: str) -> None:
    process, client = start_process("--shutdown-timeout", timeout)
    thread, lines = start_stream(client, "LOOP(")
    process.send_signal(signal.SIGTERM)
    thread.join(20)
    events = [line for line in lines if line]
    assert '"error"' in events[-2]
    assert "the server stopped" in events[-2]
    assert events[-1] == "data: [DONE]"
    assert process.wait(20) == 0


def test_ctrl_c_ends_an_idle_server(start_process: StartProcess) -> None:
    process, _ = start_process()
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in log


def test_a_taken_port_is_one_clear_line(start_process: StartProcess) -> None:
    _, client = start_process()
    port = str(client.base_url.port)
    second = subprocess.run([*TIDEWHEEL, "serve", "--port", port], capture_output=True, text=True, timeout=30)
    assert second.returncode == 1
    assert second.stderr.splitlines() == [f"tidewheel serve: cannot listen on 127.0.0.1:{port}: Address already in use"]
