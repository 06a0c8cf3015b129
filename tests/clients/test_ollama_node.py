"""The `ollama` package of npm over real sockets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from clients.conftest import NODE_MODULES, node_environment
from server.conftest import StartServer
from system_tools import require

SCENARIO = Path(__file__).with_name("ollama_scenario.cjs")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def test_chats_streams_calls_and_errors(start_server: StartServer) -> None:
    node = require("node")
    if not (NODE_MODULES / "ollama").is_dir():
        require("npm")
        pytest.fail(f"there is no ollama in {NODE_MODULES}: run `make python-test`")
    server = start_server(tool_call_parser="hermes")
    command = [node, str(SCENARIO), server.url, "SAY(grüß dich)YAS", f"SAY({CALL})YAS"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=node_environment())
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["whole"] == got["streamed"] == "grüß dich"
    assert got["took"] > 0
    assert [call["function"]["arguments"] for call in got["tool_calls"]] == [{"city": "Köln"}]
    assert got["generated"].startswith("gr")
    assert "not served here" in got["failure"]
    assert got["models"] == ["scripted:latest"]
