"""The cost of HTTP, measured on real processes."""

from __future__ import annotations

import json
from pathlib import Path

import overhead
import pytest

SHORT = "--streams 2 --prompt-tokens 4 --tokens 240 --rounds 1".split()


# Two processes load the model.
@pytest.mark.sweep
def test_the_same_streams_with_and_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "overhead.json"
    assert overhead.main([*SHORT, "--json", str(target), "--", "--max-model-len", "256"]) == 0
    result = json.loads(target.read_text())
    assert result["streams"] == 2
    alone, through = (result[f"{kind}_tokens_per_second"]["median"] for kind in ("offline", "http"))
    assert result["ratio"]["median"] == pytest.approx(through / alone, rel=0.01)
    assert "ratio, round by round" in capsys.readouterr().out


def test_a_server_that_does_not_start(capfd: pytest.CaptureFixture[str]) -> None:
    assert overhead.main([*SHORT, "--", "--kv-cache-dtype", "int7"]) == 1
    assert "int7" in capfd.readouterr().err


@pytest.mark.sweep  # again two processes
def test_answers_that_cannot_be_as_long_as_asked(capfd: pytest.CaptureFixture[str]) -> None:
    assert overhead.main([*SHORT, "--", "--max-model-len", "16"]) == 1
    assert "context is too small" in capfd.readouterr().err
