"""Servers of several models, in this process."""

from __future__ import annotations

import contextlib
import gc
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import httpx
import pytest

from tidewheel.server.app_resources import find_resources
from tidewheel.server.hosting.catalog import Catalog
from tidewheel.server.hosting.hosted_models import HostedModels
from tidewheel.server.hosting.service import build_host_server
from tidewheel.server.options.serve import parse_options


class HostServer:
    """A server of the models that a command line names, over a real socket."""

    def __init__(self, *arguments: str) -> None:
        # A unit's end looks for garbage in all objects, of which a process of tests has far more than a server.
        gc.freeze()
        options = parse_options(arguments, {})
        self._server = build_host_server(options, Catalog(options), find_resources(options.app), None)
        self.models = cast("HostedModels", self._server._engines)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]  # for the main thread alone
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> None:
        """End it, and wait for that."""
        self._server.should_exit = True
        self._thread.join(20)
        self.http.close()


StartHost = Callable[..., HostServer]


@pytest.fixture(scope="module")
def start_host() -> Iterator[StartHost]:
    """Starts servers, by arguments of `tidewheel serve`; all stop when the module's tests are over."""
    servers: list[HostServer] = []

    def start(*arguments: str) -> HostServer:
        servers.append(HostServer("--disable-log-requests", *arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def other_model(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another folder with the same."""
    return shutil.copytree(dummy_model, tmp_path_factory.mktemp("other") / "model")
