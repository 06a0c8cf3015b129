"""Servers for the clients, and Node.js to run its own with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import encoder_zoo as zoo
import pytest
from server.conftest import RunningServer, StartServer, demo_server, dummy_model, start_server
from system_tools import require

from tidewheel.engine.encoders.load import load_encoders

__all__ = ["demo_server", "dummy_model", "start_server"]  # fixtures

SCENARIOS = Path(__file__).with_name("openai_scenarios.cjs")
NODE_MODULES = Path(sys.prefix) / "node" / "node_modules"  # where `make test` installs package-lock.json

RunScenario = Callable[..., Any]


@pytest.fixture(scope="module")
def scripted(start_server: StartServer) -> RunningServer:
    """A scripted chat model that calls tools and reasons, an embedding model, and keys."""
    encoders = load_encoders([str(zoo.folder("bert"))], ["embed"])
    return start_server(encoders=encoders, tool_call_parser="hermes", reasoning_parser="qwen3", api_keys=["secret"])


@pytest.fixture(scope="module")
def slow(start_server: StartServer) -> RunningServer:
    """A scripted chat model whose tokens take a while."""
    return start_server(engine={"step_s": 0.01}, api_keys=["secret"])


@pytest.fixture(scope="module")
def run_node() -> Iterator[RunScenario]:
    """Runs a scenario of openai_scenarios.cjs against the server of a URL and returns its result.

    One process runs all of a module. Without Node.js the tests are skipped.
    """
    node = require("node")
    if not (NODE_MODULES / "openai").is_dir():
        require("npm")
        pytest.fail(f"there is no openai in {NODE_MODULES}: run `make python-test`")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([node, str(SCENARIOS)], **pipes, text=True, env=node_environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(scenario: str, url: str, **arguments: Any) -> Any:
            settings = {"baseURL": f"{url}/v1", "apiKey": "secret", "maxRetries": 0}
            print(json.dumps([scenario, settings, arguments]), file=process.stdin, flush=True)
            said = json.loads(process.stdout.readline())
            assert "error" not in said, said["error"]
            return said["result"]

        yield run
        process.stdin.close()
        assert process.wait(60) == 0


def node_environment() -> dict[str, str]:
    """The environment that lets Node.js find the clients."""
    return {**os.environ, "NODE_PATH": str(NODE_MODULES)}


def say(text: str) -> list[dict[str, str]]:
    """Messages that the scripted model answers with `text`."""
    return [{"role": "user", "content": f"SAY({text})YAS"}]


def until_idle(server: RunningServer) -> None:
    """Waits until no request runs or waits."""
    deadline = time.monotonic() + 60
    while (stats := server.engine.stats()).num_running or stats.num_waiting:
        assert time.monotonic() < deadline, "the engine works on for a client that has gone"
        time.sleep(0.01)
