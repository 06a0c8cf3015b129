"""The comparison of two servers' answers, by which images for other machines are judged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from server.conftest import RunningServer, ServerProcess, StartServer

COMMAND = [sys.executable, str(Path(__file__).parents[2] / "tools" / "same_answers.py"), "--wait", "10"]


def compare(*urls: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *urls], capture_output=True, text=True, check=False)


def test_a_server_answers_as_itself(demo_server: ServerProcess) -> None:
    done = compare(demo_server.url, demo_server.url)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("logprobs within 0.0e+00") == 13


def test_other_tokens_are_found(demo_server: ServerProcess, start_server: StartServer) -> None:
    other: RunningServer = start_server()
    done = compare(demo_server.url, other.url)
    assert done.returncode == 1
    assert "the tokens differ" in done.stdout
