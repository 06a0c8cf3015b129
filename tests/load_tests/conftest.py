"""The stand-in server, running."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from load_tests.stub import StubServer, build_stub
from server.conftest import start_server

__all__ = ["start_server", "stub"]  # fixtures


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A running stub on a port of its own."""
    requests: list[dict[str, Any]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(build_stub(requests), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield StubServer(f"http://127.0.0.1:{listener.getsockname()[1]}", requests)
        server.should_exit = True
        thread.join()
