"""Ray is taken without being asked for where this machine alone does not have what was asked for."""

from __future__ import annotations

import os
import sys

import pytest

from tidewheel.engine.install_hint import install_command
from tidewheel.ray.taking import with_ray
from tidewheel.server.commands.cli import main
from tidewheel.server.options.serve import parse_options

TOO_MANY = str(len(os.sched_getaffinity(0)) + 1)
STAGES = ("--pipeline-parallel-size", TOO_MANY)


@pytest.mark.parametrize(
    ("line", "cluster", "backend"),
    [
        ((), True, None),
        (("--data-parallel-size", "2"), False, "ray"),
        (("--data-parallel-size", "2", "--cpus-per-replica", "1"), False, "ray"),
        (STAGES, True, "ray"),
        (STAGES, False, None),  # they take turns
        ((*STAGES, "--distributed-executor-backend", "mp"), True, "mp"),
        ((*STAGES, "--reserved-cpus", "0"), True, None),
        ((*STAGES, "--device", "torch"), True, None),
        (("--pipeline-parallel-size", "2", "--tensor-parallel-size", TOO_MANY), True, "ray"),
    ],
)
def test_it_is_taken_for_replicas_and_for_stages_without_a_core(
    monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...], cluster: bool, backend: str | None
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if cluster:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    options = parse_options(line, {})
    replicas, why = with_ray(options.replicas, options.engine)
    assert replicas.distributed_executor_backend == backend
    assert (why is not None) == (backend == "ray")
    if why is not None:
        assert why.startswith(f"{line[0]} {line[1]}")


@pytest.mark.parametrize("line", [("--data-parallel-size", "2"), STAGES])
def test_a_server_that_takes_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: tuple[str, ...]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", None)  # type: ignore[arg-type]  # this makes imports fail
    assert main(["serve", *line]) == 1
    needed = "replicas, and stages on nodes of a cluster, need Ray Serve: " + install_command("ray")
    assert needed in capsys.readouterr().err


def test_cores_of_replicas_need_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--cpus-per-replica", "2"], {})
    assert "--cpus-per-replica needs --distributed-executor-backend ray, or --data-par" in capsys.readouterr().err
