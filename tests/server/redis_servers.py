"""A Redis server for tests: the machine's own if it has one, else fakeredis over a real socket."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import fakeredis


@contextmanager
def redis_server() -> Iterator[str]:
    """The URL of an empty database, which is there until the context is left."""
    program = shutil.which("redis-server")
    with _fake_server() if program is None else _real_server(program) as port:
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def _fake_server() -> Iterator[int]:
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_version=(7,))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextmanager
def _real_server(program: str) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    process = subprocess.Popen([program, "--port", str(port), "--save", ""], stdout=subprocess.DEVNULL)
    try:
        for _ in range(500):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.01)
        yield port
    finally:
        process.kill()
        process.wait()
