"""Requests sent ahead of their answers, and clients that end their side of the connection."""

from __future__ import annotations

import json
import socket

import pytest
from server.conftest import RunningServer, StartProcess, StartServer
from server.processes import memory
from server.raw_http import CLOSE, GET, connect, error_code, read_all
from server.waiting import eventually, is_idle

POST = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"


def completion(said: str, more: bytes = b"", **fields: object) -> bytes:
    body = json.dumps({"prompt": f"SAY({said})YAS", **fields}).encode()
    return POST + more + b"content-length: %d\r\n\r\n" % len(body) + body


def chunked(said: str, size: int, more: bytes = b"") -> bytes:
    body = json.dumps({"prompt": f"SAY({said})YAS"}).encode()
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return POST + more + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def test_answers_come_in_the_order_of_requests(server: RunningServer) -> None:
    connection = connect(server)
    kinds = (
        lambda i: completion(f"({i})"),
        lambda i: chunked(f"({i})", 7),
        lambda i: GET + b"x-request-id: %d\r\n\r\n" % i,
    )
    connection.sendall(b"".join(kinds[i % 3](i) for i in range(90)) + completion("the last", CLOSE))
    response = read_all(connection)
    assert response.count(b"HTTP/1.1 200 OK\r\n") == 91
    found = [response.index(b'"(%d)"' % i if i % 3 < 2 else b"x-request-id: %d\r\n" % i) for i in range(90)]
    assert found == sorted(found)
    assert b"the last" in response


def test_a_thousand_requests_in_one_go(server: RunningServer) -> None:
    connection = connect(server)
    connection.sendall((GET + b"\r\n") * 1000 + GET + CLOSE + b"\r\n")
    assert read_all(connection).count(b'{"status":"ok"}') == 1001


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_requests_cut_anywhere_are_understood(server: RunningServer, size: int) -> None:
    connection = connect(server)
    data = completion("one") + b"\r\n" + chunked("two\\r\\n\\r\\n", 5) + GET + b"\r\n" + completion("four", CLOSE)
    for start in range(0, len(data), size):
        connection.sendall(data[start : start + size])
    response = read_all(connection)
    assert response.count(b"HTTP/1.1 200 OK\r\n") == 4
    assert response.index(b'"one"') < response.index(b'"two') < response.index(b'"ok"') < response.index(b'"four"')


AHEAD = {
    "get": GET.replace(b"/health", b"/openapi.json") + b"\r\n",
    "chunks": chunked("b" * 500, 1).replace(b"/v1/completions", b"/tokenize"),  # which is quick to answer
    "whole": completion("a" * 500).replace(b"/v1/completions", b"/tokenize"),
}


# A process is flooded until it closes.
@pytest.mark.sweep
@pytest.mark.parametrize("kinds", [("get", "chunks"), pytest.param(tuple(AHEAD), marks=pytest.mark.sweep)])
def test_a_client_that_sends_ahead_and_does_not_read_costs_little(
    start_process: StartProcess, kinds: tuple[str, ...]
) -> None:
    server = start_process("--write-timeout", "0.1", "--disable-access-log")
    assert server.client.get("/openapi.json").status_code == 200  # which is large, and made for the first one who asks
    resident = memory(server)
    for kind in kinds:
        connection = socket.socket()
        connection.settimeout(20)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.connect(("127.0.0.1", server.port))
        ahead = AHEAD[kind] * 500
        with pytest.raises(ConnectionError):  # noqa: PT012 - how much it takes is up to the sockets
            for _ in range(4000):
                connection.sendall(ahead)
        connection.close()
        assert server.client.get("/health").status_code == 200
    assert memory(server) - resident < 24 * 2**20
    assert "did not read its answer" in server.log


def test_a_client_that_ends_its_side_gets_its_answers(server: RunningServer) -> None:
    for data, count in (
        (completion("whole"), 1),
        (completion("whole", stream=True), 1),
        (completion("whole").replace(b"HTTP/1.1", b"HTTP/1.0"), 1),
        (completion("whole") + chunked("whole", 3) + (GET + b"\r\n") * 3, 5),
    ):
        response = read_after_end(server, data)
        assert response.count(b"HTTP/1.1 200 OK\r\n") == count
        assert response.endswith((b"}", b"0\r\n\r\n"))


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_who_ends_its_side_may_wait_long(start_server: StartServer, fields: dict[str, bool]) -> None:
    slow = start_server(engine={"step_s": 0.005})
    response = read_after_end(
        slow, completion("what takes quite a while to be said, by a slow speaker", max_tokens=99, **fields)
    )
    assert response.startswith(b"HTTP/1.1 200 OK\r\n")
    assert response.count(b"HTTP/1.1") == 1
    assert b'"finish_reason":"stop"' in response


def test_who_leaves_for_good_is_noticed(start_server: StartServer) -> None:
    slow = start_server(engine={"step_s": 0.01})
    for fields in ({}, {"stream": True}, {"n": 2}):
        connection = connect(slow)
        connection.sendall(completion("", prompt="LOOP(", max_tokens=8000, **fields))
        eventually(lambda: slow.engine.stats().num_running > 0, "the request never ran")
        connection.close()
        eventually(lambda: is_idle(slow), "the engine works on for a client that has gone")


@pytest.mark.parametrize("data", [b"GET /health HT", GET, POST, completion("half")[:-5], chunked("half", 5)[:-3]])
def test_who_ends_within_a_request_is_told(server: RunningServer, data: bytes) -> None:
    response = read_after_end(server, data)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert error_code(response) == "invalid_http"
    assert b"before it was complete" in response


@pytest.mark.parametrize("data", [b"", b"\r\n", b"\r\n\r\n"])
def test_who_ends_without_a_request_gets_nothing(server: RunningServer, data: bytes) -> None:
    assert read_after_end(server, data) == b""


def read_after_end(server: RunningServer, data: bytes) -> bytes:
    connection = connect(server)
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    return read_all(connection)


@pytest.mark.parametrize(
    "line",
    [b"GET /health", b"GET /health HTTP/0.9", b"GET /health HTTP/1.2", b"GET / HTTP/2.0", b"PRI * HTTP/2.0\r\n\r\nSM"],
)
def test_other_versions_of_http_are_refused(server: RunningServer, line: bytes) -> None:
    connection = connect(server)
    connection.sendall(line + b"\r\n\r\n")
    response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert error_code(response) == "invalid_http"


def test_a_wish_for_another_protocol_is_ignored(server: RunningServer) -> None:
    # Java's client sends it along with its first request.
    wish = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
    connection = connect(server)
    connection.sendall(
        completion("first", wish) + completion("second") + GET + wish + b"\r\n" + completion("last", CLOSE)
    )
    response = read_all(connection)
    assert response.count(b"HTTP/1.1 200 OK\r\n") == 4
    assert all(said in response for said in (b"first", b"second", b"last"))
