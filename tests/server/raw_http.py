"""HTTP byte by byte, for clients that no library would play."""

from __future__ import annotations

import json
import socket
from typing import Any

from server.conftest import RunningServer

GET = b"GET /health HTTP/1.1\r\nhost: test\r\n"
CLOSE = b"connection: close\r\n"


def post_raw(server: RunningServer, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.socket()
    connection.settimeout(20)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    connection.connect(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def connect(server: RunningServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass  # it closed with some of what was sent unread
    connection.close()
    return received


def error_code(response: bytes) -> str:
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    code: str = json.loads(body)["error"]["code"]
    return code


def read_health(connection: socket.socket) -> None:
    received = b""
    while not received.endswith(b'{"status":"ok"}'):
        piece = connection.recv(4096)
        assert piece, f"the connection was closed after {received!r}"
        received += piece
    assert received.startswith(b"HTTP/1.1 200")
