"""SIGTERM: answers that run may finish, for a while, and those that may not are told."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time

import httpx
import pytest
from server.conftest import TIDEWHEEL, StartProcess
from server.waiting import eventually


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


def test_a_client_that_does_not_read_does_not_hold_up_the_end(start_process: StartProcess) -> None:
    server = start_process("--shutdown-timeout", "0")
    body = json.dumps({"prompt": "LOOP(", "max_tokens": 4000, "stream": True, "n": 8, "logprobs": 20}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        stuck.sendall(head.encode() + body)
        thread, lines = server.start_stream("LOOP(")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        thread.join(20)
        assert "the server stopped" in "".join(lines)


def test_a_step_that_hangs_is_reported_and_does_not_hold_up_the_end(start_process: StartProcess) -> None:
    server = start_process("--shutdown-timeout", "0.2", "--step-timeout", "0.3")
    thread, lines = server.start_stream("SAY(something)YAS" + "LOOP(")
    hanging = threading.Thread(
        target=server.client.post, args=("/v1/completions",), kwargs={"json": {"prompt": "HANG("}}
    )
    hanging.start()
    eventually(lambda: "the stacks of all threads" in server.log, "the watchdog said nothing")
    assert "steps_stalled_total" in server.client.get("/metrics").text
    server.process.send_signal(signal.SIGTERM)
    for reader in (thread, hanging):
        reader.join(20)
    assert '"error"' in "".join(lines)
    assert server.wait() == 1
    assert "scripted_engine.py" in server.log  # the engine thread's stack


def test_a_failing_engine_ends_the_process(start_process: StartProcess) -> None:
    server = start_process()
    readers = [server.start_stream("LOOP(") for _ in range(3)]
    response = server.client.post("/v1/completions", json={"prompt": "KILL("})
    assert response.status_code >= 500
    assert "the device is gone" in response.json()["error"]["message"]
    for thread, lines in readers:
        thread.join(20)
        events = [line for line in lines if line]
        assert "the device is gone" in events[-2]
        assert events[-1] == "data: [DONE]"
    assert server.wait() == 1
    assert server.log.splitlines()[-1] == "tidewheel serve: the engine has failed: the device is gone"


def test_a_killed_server_leaves_its_clients_with_an_error_and_no_more(start_process: StartProcess) -> None:
    server = start_process()
    failures: list[Exception] = []

    def read() -> None:
        try:
            body = {"prompt": "LOOP(", "max_tokens": 8000, "stream": True}
            with server.client.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    assert "[DONE]" not in line
        except httpx.TransportError as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(20)]
    for reader in readers:
        reader.start()
    eventually(lambda: "num_requests_running{model_name" in server.client.get("/metrics").text, "it never ran")
    server.process.kill()
    for reader in readers:
        reader.join(20)
    assert len(failures) == 20
    assert start_process(port=server.port).client.get("/health").status_code == 200  # the port is free at once


def test_many_answers_at_once_finish(start_process: StartProcess) -> None:
    server = start_process()
    readers = [server.start_stream(f"SAY(answer {i} is {'long ' * 10})YAS") for i in range(40)]
    server.process.send_signal(signal.SIGTERM)
    for i, (thread, lines) in enumerate(readers):
        thread.join(30)
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "".join(c["choices"][0]["text"] for c in chunks) == f"answer {i} is {'long ' * 10}"
        assert lines[-2:] == ["data: [DONE]", ""]
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


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_what_runs_at_once(start_process: StartProcess, second: signal.Signals) -> None:
    server = start_process("--shutdown-timeout", "600")
    stream, lines = server.start_stream("LOOP(")
    whole: list[httpx.Response] = []
    body = {"prompt": "LOOP(", "max_tokens": 8000}
    asking = threading.Thread(target=lambda: whole.append(server.client.post("/v1/completions", json=body)))
    asking.start()
    eventually(lambda: server.log.count("POST") >= 1, "the stream was never begun")
    time.sleep(0.3)
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: "Waiting for connections" in server.log, "the first signal was not heard")
    count = len(lines)
    eventually(lambda: len(lines) > count, "the first signal has ended the stream")
    server.process.send_signal(second)
    stream.join(20)
    asking.join(20)
    assert "the server stopped" in lines[-4]
    assert lines[-2] == "data: [DONE]"
    assert whole[0].status_code == 503
    assert server.wait() == 0


def test_a_second_signal_does_not_wait_for_who_does_not_read(start_process: StartProcess) -> None:
    server = start_process("--shutdown-timeout", "600", "--write-timeout", "600")
    body = json.dumps({"prompt": "LOOP(", "max_tokens": 4000, "stream": True, "n": 8, "logprobs": 20}).encode()
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        stuck.connect(("127.0.0.1", server.port))
        head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        stuck.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert stuck.recv(12) == b"HTTP/1.1 200"
        for _ in range(2):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        assert server.wait() == 0
