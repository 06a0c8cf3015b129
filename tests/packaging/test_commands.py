"""The files that build, start and watch Tidewheel say what they should."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import tidewheel

ROOT = Path(__file__).parents[2]


def make(*words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT), *words],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return done.stdout


def test_make_serve_passes_its_variables_on() -> None:
    plan = make("--dry-run", "serve", "MODEL=some/model", "PORT=9", "ARGS=--dtype float32", "VENV=nowhere")
    assert "nowhere/bin/tidewheel serve some/model --host 127.0.0.1 --port 9 --dtype float32" in plan


def test_make_test_runs_every_check() -> None:
    plan = make("--dry-run", "test", "VENV=nowhere")
    for command in ("ruff check", "mypy", "hadolint", "ctest", "pytest"):
        assert f"nowhere/bin/{command}" in plan


def test_make_image_labels_the_image_with_the_version() -> None:
    plan = make("--dry-run", "image", "BASE=some/base", "IMAGE=name:tag")
    assert f"docker build --build-arg BASE=some/base --build-arg VERSION={tidewheel.__version__} " in plan
    assert "-f Dockerfile.cpu -t name:tag ." in plan


def test_make_help_lists_the_commands() -> None:
    listed = make("help")
    for target in ("serve", "test", "lint", "bench", "image", "lock", "clean"):
        assert f"make {target} " in listed


@contextmanager
def health(status: int) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def health_check() -> list[str]:
    """The command that the container engine uses to check the server's health."""
    dockerfile = (ROOT / "Dockerfile.cpu").read_text()
    match = re.search(r"^HEALTHCHECK .*?CMD (\[.*?\])$", dockerfile, re.MULTILINE | re.DOTALL)
    assert match is not None
    command: list[str] = json.loads(match[1])
    assert command[0] == "python3"
    return [sys.executable, *command[1:]]


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_follows_the_servers_word(health_check: list[str], status: int, code: int) -> None:
    with health(status) as port:
        done = subprocess.run(health_check, env={"TIDEWHEEL_PORT": str(port)}, check=False)
    assert done.returncode == code


def test_the_health_check_fails_where_nothing_listens(health_check: list[str]) -> None:
    done = subprocess.run(health_check, env={"TIDEWHEEL_PORT": "9"}, capture_output=True, check=False)
    assert done.returncode != 0
