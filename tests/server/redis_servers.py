"""A Redis server for tests: the machine's own if it has one, else fakeredis over a real socket. A cluster is real."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fakeredis
import redis
from ports import free_port
from system_tools import require


@contextmanager
def redis_server(*, real: bool = False) -> Iterator[str]:
    """The URL of an empty database, which is there until the context is left. `real` is for what fakeredis cannot."""
    program = require("redis-server") if real else shutil.which("redis-server")
    with _fake_server() if program is None else _real_server(program) as port:
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def redis_cluster(folder: Path) -> Iterator[str]:
    """The URL of an empty cluster: one server that has all slots, and is as strict about them as a larger one."""
    alone = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--dir", str(folder))
    with _real_server(require("redis-server"), *alone) as port:
        with redis.Redis(port=port) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            for _ in range(500):
                if client.cluster("info")["cluster_state"] == "ok":
                    break
                time.sleep(0.02)
            else:
                raise AssertionError("the cluster has not begun to serve within 10 s")
        yield f"redis://127.0.0.1:{port}"


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
def _real_server(program: str, *arguments: str) -> Iterator[int]:
    port = free_port()
    process = subprocess.Popen([program, "--port", str(port), "--save", "", *arguments], stdout=subprocess.DEVNULL)
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
