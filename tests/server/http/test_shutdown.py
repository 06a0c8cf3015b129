"""SIGTERM: running answers may finish for a while. After that they end with an error."""

from __future__ import annotations

import json
import signal
import socket
import threading

import httpx
import pytest
from samples import swept
from server.conftest import RefusedStart, StartProcess
from server.processes import ScriptedProcess
from server.scripted_engine import impatient
from server.waiting import eventually


def begin_unread_answer(server: ScriptedProcess, stuck: socket.socket) -> None:
    """Asks for a long answer on a connection whose buffer is small, and reads no more than its first line."""
    body = json.dumps({"prompt": "LOOP(", "max_tokens": 4000, "stream": True, "n": 8, "logprobs": 20}).encode()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.connect(("127.0.0.1", server.port))
    head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    stuck.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    assert stuck.recv(12) == b"HTTP/1.1 200"


def is_refused(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) != 0


# A process starts, and its answers take a second.
@pytest.mark.parametrize("end", [signal.SIGTERM, swept(signal.SIGHUP)], ids=lambda end: end.name)
def test_running_answers_finish_and_no_more_are_begun(start_process: StartProcess, end: signal.Signals) -> None:
    server = start_process()
    readers = [server.start_stream(f"SAY(answer {i} is {'long ' * 15})YAS") for i in range(12)]
    server.process.send_signal(end)
    eventually(lambda: is_refused(server.port), "it goes on listening")
    for i, (thread, lines) in enumerate(readers):
        thread.join(60)
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "".join(c["choices"][0]["text"] for c in chunks) == f"answer {i} is {'long ' * 15}"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert lines[-2:] == ["data: [DONE]", ""]
    assert server.wait() == 0
    with pytest.raises(httpx.ConnectError):
        server.client.get("/health")


@pytest.mark.parametrize("timeout", [swept("0"), "0.3"])
def test_answers_that_take_too_long_end_with_an_error_event(start_process: StartProcess, timeout: str) -> None:
    """And a client that does not read does not hold up the end."""
    server = start_process("--shutdown-timeout", timeout)
    with socket.socket() as stuck:
        begin_unread_answer(server, stuck)
        thread, lines = server.start_stream("LOOP(")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    thread.join(20)
    events = [line for line in lines if line]
    assert '"error"' in events[-2]
    assert "the server stopped" in events[-2]
    assert events[-1] == "data: [DONE]"


# The end waits for a second.
@pytest.mark.sweep
def test_a_step_that_hangs_is_reported_and_does_not_hold_up_the_end(start_process: StartProcess) -> None:
    server = start_process("--shutdown-timeout", "0.2", "--step-timeout", "0.3", environment=impatient(1))
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


@pytest.mark.sweep
def test_a_killed_server_leaves_its_clients_with_an_error_and_no_more(start_process: StartProcess) -> None:
    server = start_process()
    failures: list[Exception] = []
    begun = threading.Barrier(9)

    def read() -> None:
        try:
            body = {"prompt": "LOOP(", "max_tokens": 8000, "stream": True}
            with server.client.stream("POST", "/v1/completions", json=body) as response:
                begun.wait(60)
                for line in response.iter_lines():
                    assert "[DONE]" not in line
        except httpx.TransportError as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(8)]
    for reader in readers:
        reader.start()
    begun.wait(60)
    server.process.kill()
    server.wait()
    for reader in readers:
        reader.join(20)
    assert len(failures) == 8
    with socket.socket() as next_one:
        next_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        next_one.bind(("127.0.0.1", server.port))


def test_ctrl_c_ends_an_idle_server(start_process: StartProcess) -> None:
    server = start_process()
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0
    assert "Traceback" not in server.log


def test_a_taken_port_is_one_clear_line(refused_start: RefusedStart) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = f"tidewheel serve: cannot listen on 127.0.0.1:{port}: Address already in use\n"
        assert refused_start("--port", str(port)) == (1, said)


@pytest.mark.parametrize("second", [signal.SIGTERM, swept(signal.SIGINT)])
def test_a_second_signal_ends_what_runs_at_once(start_process: StartProcess, second: signal.Signals) -> None:
    """Neither what runs nor who does not read is waited for."""
    server = start_process("--shutdown-timeout", "600", "--write-timeout", "600")
    whole: list[httpx.Response] = []
    body = {"prompt": "LOOP(", "max_tokens": 8000}
    asking = threading.Thread(target=lambda: whole.append(server.client.post("/v1/completions", json=body)))
    with socket.socket() as stuck:
        begin_unread_answer(server, stuck)
        stream, lines = server.start_stream("LOOP(")
        asking.start()
        # The first has eight choices.
        eventually(lambda: " 10.0" in running(server), "not all are begun")
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: "Waiting for connections" in server.log, "the first signal was not heard")
        count = len(lines)
        eventually(lambda: len(lines) > count, "the first signal has ended the stream")
        server.process.send_signal(second)
        assert server.wait() == 0
    stream.join(20)
    asking.join(20)
    assert "the server stopped" in lines[-4]
    assert lines[-2] == "data: [DONE]"
    assert whole[0].status_code == 503


def running(server: ScriptedProcess) -> str:
    metrics = server.client.get("/metrics").text.splitlines()
    return next(line for line in metrics if "num_requests_running{" in line)
