"""SIGTERM: answers that run may finish, for a while, and those that may not are told."""

from __future__ import annotations

import signal
import subprocess
import time

import httpx
import pytest
from server.conftest import TIDEWHEEL, StartProcess


def test_running_answers_finish(start_process: StartProcess) -> None:
    server = start_process()
    thread, lines = server.start_stream("SAY(" + "long " * 20 + ")YAS")
    server.process.send_signal(signal.SIGTERM)
    thread.join(20)
    assert '"finish_reason":"stop"' in "".join(lines)
    assert "data: [DONE]" in lines
    assert server.wait() == 0
    with pytest.raises(httpx.ConnectError):
        server.client.get("/health")


def test_new_connections_are_refused_while_it_drains(start_process: StartProcess) -> None:
    server = start_process()
    thread, _ = server.start_stream("SAY(" + "long " * 40 + ")YAS")
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 20
    with pytest.raises(httpx.TransportError):  # noqa: PT012 - how soon it stops listening is up to it
        while time.monotonic() < deadline:
            httpx.get(f"{server.client.base_url}/health", trust_env=False)
            time.sleep(0.01)
    thread.join(20)
    assert server.wait() == 0


@pytest.mark.parametrize("timeout", ["0", "0.3"])
def test_answers_that_take_too_long_end_with_an_error_event(start_process: StartProcess, timeout: str) -> None:
    server = start_process("--shutdown-timeout", timeout)
    thread, lines = server.start_stream("LOOP(")
    server.process.send_signal(signal.SIGTERM)
    thread.join(20)
    events = [line for line in lines if line]
    assert '"error"' in events[-2]
    assert "the server stopped" in events[-2]
    assert events[-1] == "data: [DONE]"
    assert server.wait() == 0


def test_ctrl_c_ends_an_idle_server(start_process: StartProcess) -> None:
    server = start_process()
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0
    assert "Traceback" not in server.log


def test_a_taken_port_is_one_clear_line(start_process: StartProcess) -> None:
    port = str(start_process().port)
    second = subprocess.run([*TIDEWHEEL, "serve", "--port", port], capture_output=True, text=True, timeout=30)
    assert second.returncode == 1
    assert second.stderr.splitlines() == [f"tidewheel serve: cannot listen on 127.0.0.1:{port}: Address already in use"]
