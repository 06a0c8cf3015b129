"""Hops of a real pipeline, and pipelines on paper."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pipeline
import pytest
from ports import free_port
from waiting import wait_until


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server with two stages."""
    command = [str(Path(sys.executable).with_name("tidewheel")), "serve", "--port", str(port := free_port())]
    command += ["--device", "cpu", "--pipeline-parallel-size", "2", "--distributed-executor-backend", "mp"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or _is_ready(address))
        yield address
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=10):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


# Two processes start: one for each stage.
def test_hops_are_counted(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.main(["hops", "--url", url, "--seconds", "0.3"])
    found = re.search(r"p50 (\d+) us, (\d+) to (\d+)", capsys.readouterr().out)
    assert found is not None
    median, least, most = map(int, found.groups())
    assert 0 < least <= median <= most


def _paper(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[list[list[float]], int]:
    """The table's rows, and from how many machines on the network takes longer."""
    pipeline.main(["paper", *options])
    _, *rows, last = capsys.readouterr().out.splitlines()
    most = re.search(r"from (\d+) machines", last)
    assert most is not None
    return [[float(cell) for cell in row.split()] for row in rows], int(most[1])


def test_machines_add_up_where_the_network_is_fast(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hop-us", "0", "--network", "1e6", "--machines", "1,2,4", "--streams", "1,64"]
    (one, two, four), most = _paper(capsys, *options)
    assert one[2] == two[2] == four[2] == pytest.approx(200e9 / (70e9 * 4.5 / 8), abs=0.05)  # it is read once a token
    for column in (1, 3):
        assert two[column] == pytest.approx(2 * one[column], rel=0.01)
        assert four[column] == pytest.approx(4 * one[column], rel=0.01)
    assert most > 1000


def test_a_slow_network_decides(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hop-us", "0", "--network", "0.01", "--machines", "1,8,16", "--streams", "64"]
    (_, eight, sixteen), most = _paper(capsys, *options)
    row_bits = 8 * 4 * 8192
    assert eight[1] == sixteen[1] == pytest.approx(0.01e9 / row_bits, abs=0.05)
    assert most <= 8


def test_a_hop_costs_one_stream_most(capsys: pytest.CaptureFixture[str]) -> None:
    rates = [_paper(capsys, "--hop-us", hop, "--machines", "8", "--streams", "1,64")[0][0] for hop in ("0", "100000")]
    losses = [before / after for before, after in zip(*rates, strict=True)][2:]
    assert losses[0] > losses[1] > 1
