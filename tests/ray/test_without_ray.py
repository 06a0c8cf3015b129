"""Nothing needs Ray but the replicas on it, and who lacks it reads how to get it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tidewheel.engine.install_hint import install_command
from tidewheel.server.commands.cli import main


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing Ray fails."""
    monkeypatch.setitem(sys.modules, "ray", None)  # type: ignore[arg-type]  # this makes imports fail


def test_the_server_does_not_import_it() -> None:
    names = "tidewheel.server.service, tidewheel.ray.policy, tidewheel.ray.proxy, tidewheel.ray.settings"
    command = [sys.executable, "-P", "-c", f"import sys, {names}; print('ray' in sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("what", ["--data-parallel-size", "--pipeline-parallel-size"])
def test_a_lack_of_it_is_told(what: str, no_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--distributed-executor-backend", "ray", what, "2"]) == 1
    assert install_command("ray") in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--threads-bind=0", "--reserved-cpus=1"])
def test_stages_on_nodes_have_cores_that_nobody_names(
    flag: str, no_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--distributed-executor-backend=ray", "--pipeline-parallel-size=2", flag]) == 1
    assert f"{flag.partition('=')[0]} and stages on Ray do not work together" in capsys.readouterr().err


def test_who_asks_for_nodes_reads_how_to_get_some(no_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--ray-address"]) == 1
    assert "--ray-address needs Ray Serve: " + install_command("ray") in capsys.readouterr().err


def test_haproxy_with_a_certificate_is_refused_before_ray_starts(
    no_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    files = [tmp_path / "certificate", tmp_path / "key"]
    for file in files:
        file.touch()
    given = ["--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1])]
    assert main(["serve", "--distributed-executor-backend", "ray", *given]) == 1
    assert "--ssl-certfile cannot be used with RAY_SERVE_ENABLE_HA_PROXY=1" in capsys.readouterr().err
