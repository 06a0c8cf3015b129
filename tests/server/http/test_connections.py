"""Clients that send too much, too slowly, or do not read: they are turned away, and no other client notices."""

from __future__ import annotations

import json
import re
import time

import pytest
from server.conftest import RunningServer, StartServer
from server.raw_http import CLOSE, GET, connect, error_code, post_raw, read_all
from server.waiting import eventually, is_idle

COMPLETIONS = "/v1/completions"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def strict(start_server: StartServer) -> RunningServer:
    limits = {"max_header_bytes": 2000, "max_header_count": 10, "read_timeout_s": 0.4, "write_timeout_s": 0.4}
    return start_server(engine={"step_s": 0.002}, connections=limits)


@pytest.fixture(scope="module")
def hasty(start_server: StartServer) -> RunningServer:
    """For requests that come in one piece, and for those that never do."""
    return start_server(engine={"step_s": 0.002}, connections={"read_timeout_s": 0.2, "write_timeout_s": 0.2})


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n\r\n",
        GET + b"x-large: " + b"a" * 3000 + b"\r\n\r\n",
        GET + b"x-endless: " + b"a" * 300_000,
        GET + b"".join(b"x-%d: 1\r\n" % i for i in range(10)) + b"\r\n",
    ],
)
def test_a_head_over_the_limits_is_refused(strict: RunningServer, head: bytes) -> None:
    connection = connect(strict)
    for start in range(0, len(head), 1000):
        try:
            connection.sendall(head[start : start + 1000])
        except ConnectionError:
            break
    response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert error_code(response) == "headers_too_large"


def test_a_head_within_the_limits_is_served(strict: RunningServer) -> None:
    headers = b"".join(b"x-%d: %s\r\n" % (i, b"a" * 200) for i in range(7))
    connection = connect(strict)
    connection.sendall(GET + headers + b"connection: close\r\n\r\n")
    assert read_all(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02", b"GET /health HTTP/9\r\n\r\n", GET + b"no colon\r\n\r\n"])
def test_what_is_not_http_is_refused_as_json(strict: RunningServer, garbage: bytes) -> None:
    connection = connect(strict)
    connection.sendall(garbage)
    response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert error_code(response) == "invalid_http"


def test_garbage_behind_a_request_does_not_spoil_its_answer(strict: RunningServer) -> None:
    connection = post_raw(strict, {"prompt": "SAY(whole answer)YAS", "stream": True})
    connection.sendall(b"\x00\x01 nonsense\r\n\r\n")
    response = read_all(connection)
    answer, end, refusal = response.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert end
    assert error_code(refusal) == "invalid_http"


@pytest.mark.parametrize("head", [GET, POST + b"content-length: 100\r\n\r\n{", POST[:9]])
def test_a_request_that_does_not_come_in_time_is_dropped(hasty: RunningServer, head: bytes) -> None:
    connection = connect(hasty)
    connection.sendall(head)
    response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"--read-timeout" in response


def test_a_slowloris_is_dropped(hasty: RunningServer) -> None:
    connection = connect(hasty)
    connection.sendall(GET)
    deadline = time.monotonic() + 60
    with pytest.raises(ConnectionError):  # noqa: PT012 - how many it takes is up to the server
        while time.monotonic() < deadline:
            connection.sendall(b"x-a: b\r\n")
            time.sleep(0.05)
    connection.close()


def test_a_sender_that_gets_on_is_heard_to_the_end(strict: RunningServer) -> None:
    body = json.dumps({"prompt": "a" * 4000 + "SAY(patience)YAS"}).encode()
    connection = connect(strict)
    connection.sendall(POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
    for start in range(0, len(body), 500):
        connection.sendall(body[start : start + 500])
        time.sleep(0.06)
    response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 200")
    assert b"patience" in response


def test_a_request_after_an_early_refusal_is_answered(start_server: StartServer) -> None:
    tight = start_server(max_body_bytes=100, connections={"read_timeout_s": 0.4})
    connection = connect(tight)
    connection.sendall(POST + b"content-length: 300\r\n\r\n")
    assert connection.recv(65536).startswith(b"HTTP/1.1 413")
    connection.sendall(b"a" * 300 + GET + b"\r\n")
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    connection.sendall(POST + b"content-length: 300\r\n\r\n")
    assert connection.recv(65536).startswith(b"HTTP/1.1 413")
    assert read_all(connection) == b""  # the rest never came, and there is nothing more to say about it


@pytest.mark.parametrize("head", [CLOSE, b""])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_first_reads_why_it_is_refused(
    start_server: StartServer, head: bytes, chunked: bool
) -> None:
    tight = start_server(max_body_bytes=2**20)
    body = b"a" * 16 * 2**20  # more than the sockets hold
    length, body = (
        (b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        if chunked
        else (b"content-length: %d\r\n\r\n" % len(body), body)
    )
    with connect(tight) as connection:
        connection.sendall(POST + head + length)
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_body_that_stops_is_dropped_however_long_it_is(hasty: RunningServer) -> None:
    connection = connect(hasty)
    connection.sendall(POST + b"content-length: 1000000\r\n\r\n" + b"a" * 900_000)
    assert read_all(connection).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


# Some megabytes are written until the sockets are full.
def test_a_reader_who_stops_is_dropped_and_costs_the_others_nothing(strict: RunningServer) -> None:
    # Its answer is larger than what the sockets can hold.
    stuck = post_raw(
        strict, {"prompt": ["LOOP(", "and LOOP("], "n": 4, "max_tokens": 4000, "stream": True, "logprobs": 20}
    )
    try:
        eventually(lambda: strict.engine.stats().num_running > 0, "it never ran")
        for i in range(3):
            answer = strict.post(COMPLETIONS, {"prompt": f"SAY(number {i})YAS"}).json()
            assert answer["choices"][0]["text"] == f"number {i}"
        eventually(lambda: is_idle(strict), "the engine works on for a client that does not read")
        tokens = strict.engine.stats().generation_tokens_total
        assert tokens < 8 * 4000
    finally:
        read_all(stuck)


@pytest.mark.sweep
def test_a_reader_who_is_only_slow_gets_everything(strict: RunningServer) -> None:
    slow = post_raw(strict, {"prompt": "LOOP(", "max_tokens": 400, "stream": True, "logprobs": 20})
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += slow.recv(2**16)
        time.sleep(0.01)
    slow.close()
    assert sum(map(len, re.findall(rb'"text":"(x+)"', received))) == 400


def test_pipelined_requests_wait_longer_than_the_time_limit(hasty: RunningServer) -> None:
    data = json.dumps({"prompt": "LOOP(", "max_tokens": 150}).encode()
    request = POST + b"content-length: %d\r\n" % len(data)
    connection = connect(hasty)
    connection.sendall(request + b"\r\n" + data + request + b"connection: close\r\n\r\n" + data)
    response = read_all(connection)
    assert response.count(b"HTTP/1.1 200") == 2
    assert response.count(b"x" * 150) == 2


def test_keep_alive_outlives_the_time_limits(hasty: RunningServer) -> None:
    connection = connect(hasty)
    for pause in (0, 0.3, 0.3):
        time.sleep(pause)
        connection.sendall(GET + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    connection.sendall(b"\r\n\r\n")  # stray line ends are no request
    time.sleep(0.3)
    connection.sendall(GET + b"\r\n")
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    connection.close()
