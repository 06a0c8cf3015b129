"""With few file descriptors: what is connected is served, who comes later waits, and the log says why."""

from __future__ import annotations

import contextlib
import resource
import socket
from pathlib import Path

import pytest
from samples import swept
from server.conftest import StartProcess
from server.raw_http import CLOSE, GET, read_all, read_health

from server import processes

FILES, CONNECTIONS = 128, 300
ON_ASYNCIO = """\
import sys
sys.path.insert(0, {folder!r})
from server.scripted_engine import serve
from tidewheel.server.http import server as module
module.choose_loop = lambda: "asyncio"
sys.exit(serve(sys.argv[1:]))
"""


# A process serves 300 connections, 96 at a time.
@pytest.mark.parametrize("loop", ["uvloop", swept("asyncio")])
def test_connections_wait_for_file_descriptors(
    start_process: StartProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loop: str
) -> None:
    if loop == "asyncio":
        script = tmp_path / "on_asyncio.py"
        script.write_text(ON_ASYNCIO.format(folder=str(processes.SCRIPT.parents[1])))
        monkeypatch.setattr(processes, "SCRIPT", script)
    server = start_process("--disable-access-log")
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
    stream, lines = server.start_stream("SAY(" + "goes on " * 12 + ")YAS", max_tokens=400)
    with contextlib.ExitStack() as stack:
        connections: list[socket.socket] = []
        for _ in range(CONNECTIONS):
            connections.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20)))
            connections[-1].sendall(GET + b"\r\n")
        first, later = connections[: FILES // 4], connections[FILES // 4 :]
        for connection in first:
            read_health(connection)
            connection.sendall(GET[:1])  # or it would be idle, and make room
        first[0].sendall(GET.replace(b"/health", b"/metrics")[1:] + CLOSE + b"\r\n")  # which opens files
        assert read_all(first[0]).startswith(b"HTTP/1.1 200")
        stream.join(20)
        assert lines[-2] == "data: [DONE]"
        for connection in first:
            connection.close()
        for connection in later:  # each that ends lets another one in
            read_health(connection)
            connection.close()
    assert server.client.get("/health").status_code == 200
    said = [line for line in server.log.splitlines() if "No file descriptors are left" in line]
    assert len(said) == 1
    assert f"the limit is {FILES} files (ulimit -n" in said[0]
    assert "Traceback" not in server.log


# They must have been idle for a second.
def test_idle_connections_make_room(start_process: StartProcess) -> None:
    server = start_process("--disable-access-log")
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
    with contextlib.ExitStack() as stack:
        for _ in range(FILES + 10):  # more than there is room for
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            connection.sendall(GET + b"\r\n")
            read_health(connection)
