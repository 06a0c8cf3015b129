"""Clients that have an environment of their own: each asks the embedded model for a call, a stream and an object.

`make clients` installs them: they are the extra `clients`. What each does is in scenarios/, and what they send in
recorded/, which test_recorded_requests.py sends again. `make test` has only the one for Node.js, which starts at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clients.conftest import NODE_MODULES, node_environment
from server.conftest import ServerProcess
from system_tools import require, say_skipped

PYTHON = Path(sys.prefix) / "clients" / "bin" / "python"
SCENARIOS = Path(__file__).with_name("scenarios")
NAMES = sorted(path.name for path in SCENARIOS.glob("with_*"))
MARKED = [name if name.endswith(".cjs") else pytest.param(name, marks=pytest.mark.clients) for name in NAMES]


@pytest.fixture(scope="module", params=MARKED)
def results(request: pytest.FixtureRequest, demo_server: ServerProcess) -> Any:
    name = request.param
    program = [require("node")] if name.endswith(".cjs") else [str(PYTHON)]
    if not (NODE_MODULES / "ai" if name.endswith(".cjs") else PYTHON).exists():
        lack = "Skipped: the tests with other clients need their packages (make clients)"
        say_skipped(lack)
        pytest.skip(lack.removeprefix("Skipped: "))
    command = [*program, str(SCENARIOS / name), demo_server.url]
    # Without what says where this Python looks for packages: theirs are others.
    environment = {name: value for name, value in node_environment().items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_tool_round_trip(results: Any) -> None:
    assert list(results["called"]) == ["city"]
    assert results["answer"]


def test_a_stream_is_the_whole_answer(results: Any) -> None:
    assert results["streamed"] == results["whole"]
    assert "Tidewheel" in results["whole"]


def test_structured_output(results: Any) -> None:
    wheels = [results["structured"], *(results[name] for name in ("partial", "by tool") if name in results)]
    for wheel in wheels:
        assert 3 <= wheel["spokes"] <= 9
        assert wheel["material"] in ("oak", "iron")
