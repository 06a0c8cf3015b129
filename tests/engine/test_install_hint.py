"""The command that installs what an optional part needs: it works from a checkout and from a wheel."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from tidewheel.engine.install_hint import install_command


@pytest.mark.parametrize("extra", ["redis", "otel", "torch", "transformers", "mistral", "onnx", "ray", "tpu", "cuda"])
def test_the_command_names_packages_that_an_index_has(extra: str) -> None:
    python, *arguments = shlex.split(install_command(extra))
    assert (python, arguments[:3]) == (sys.executable, ["-m", "pip", "install"])
    assert arguments[3:]
    assert not any("tidewheel" in one or ";" in one for one in arguments[3:])


def test_pip_takes_the_command() -> None:
    checked = [*shlex.split(install_command("redis")), "--dry-run", "--no-index", "--no-deps", "--find-links", "."]
    done = subprocess.run(checked, capture_output=True, text=True)
    assert "redis" in done.stdout + done.stderr
    assert "Invalid requirement" not in done.stderr
