"""Bars are measured once, kept, and compared with their goals. The measurements here are stubs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bar_runs
import pytest
import standings
from bar_runs import Measurement, Setup
from bars import DECODE_8, PREFILL, Bar, Figure
from contest import RunError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs the command on stubs: its status, what it printed, and which measurements were run."""

    def stub(name: str, bar: Bar, value: float | None, lacks: str | None = None) -> Measurement:
        def measure(setup: Setup) -> dict[str, Figure]:
            ran.append(name)
            if value is None:
                raise RunError("no room")
            return {bar.figure: Figure(value, "of something")}

        return Measurement(name, [bar], measure, lambda setup: lacks)

    ran: list[str] = []
    stubs = [
        stub("fast", Bar("share", 0.5), 0.61),
        stub("slow", Bar("share", 0.5), 0.4),
        stub("early", Bar("seconds", 0.7, at_most=True), 0.65),
        stub("broken", Bar("share", 0.5), None),
        stub("elsewhere", Bar("share", 0.5), 0.6, lacks="this processor lacks amx"),
    ]
    monkeypatch.setattr(standings, "measurements", lambda: stubs)

    def command(*arguments: str) -> tuple[int, str, list[str]]:
        ran.clear()
        status = standings.main([*arguments, "--json", str(tmp_path / "kept.json"), "--keep", str(tmp_path)])
        return status, capsys.readouterr().out, list(ran)

    return command


def test_each_bar_has_its_figure_and_verdict(run: Callable[..., Any]) -> None:
    status, shown, ran = run()
    assert status == 1
    assert ran == ["fast", "slow", "early", "broken"]
    assert re.search(r"fast +share +at least 0\.5 +0\.61 +yes +of something", shown)
    assert re.search(r"slow +share +at least 0\.5 +0\.4 +no ", shown)
    assert re.search(r"early +seconds +at most 0\.7 +0\.65 +yes ", shown)
    assert re.search(r"broken +share +at least 0\.5 +- +- +failed: no room", shown)
    assert "2 of 4 bars that were measured hold." in shown
    assert "because this processor lacks amx:\n  elsewhere\n" in shown


def test_what_was_measured_is_kept(run: Callable[..., Any]) -> None:
    assert run("--only", "fast|early")[::2] == (0, ["fast", "early"])
    assert run()[2] == ["slow", "broken"]
    assert run("--again", "--only", "fast")[2] == ["fast"]
    status, shown, ran = run("--show", "--only", "slow")
    assert (status, ran) == (1, [])
    assert "0 of 1 bars that were measured hold." in shown


def test_figures_of_another_processor_are_refused(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run("--only", "fast")
    monkeypatch.setattr(standings, "cpu_model", lambda: "Another 9000")
    with pytest.raises(SystemExit, match="name another --json"):
        run("--only", "fast")


def test_shares_are_of_what_bounds_a_phase() -> None:
    def decode(size: int, context: int, memory: float, arithmetic: float) -> dict[str, Any]:
        return {
            "batch_size": size, "context": context, "tokens_per_second": {"median": 10.0},
            "memory_fraction": memory, "compute_fraction": arithmetic,
        }  # fmt: skip

    prefill = {"prompts": 4, "tokens": 512, "tokens_per_second": {"median": 10.0}, "compute_fraction": 0.6}
    decodes = [decode(1, 128, 0.9, 0.1), decode(8, 128, 0.5, 0.6), decode(32, 128, 0.3, 0.4), decode(8, 4096, 0.7, 0.8)]
    found = bar_runs.shares({"prefill": [prefill], "decode": decodes})
    values = {name: figure.value for name, figure in found.items()}
    assert values == {PREFILL: 0.6, "decode 1": 0.9, DECODE_8: 0.75, "decode 32": 0.4, "decode 8 after 4096": 0.7}


def test_servers_are_compared_with_the_best_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(arguments: list[str]) -> int:
        assert str(tmp_path / "smol360/Q4_K_M.gguf") in arguments
        rows = [
            {"server": name, "failures": [], "figures": [{"clients": 8, "tokens_per_s": rate, "itl_p99": 80.0}]}
            for name, rate in (("tidewheel", 300.0), ("llama-server", 100.0), ("ik-llama-cpp", 200.0))
        ]
        Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps({"rows": rows}))
        return 0

    monkeypatch.setattr(bar_runs.closed_loop, "main", compare)
    (tmp_path / "smol360").mkdir()
    (tmp_path / "smol360/Q4_K_M.gguf").write_text("")
    setup = Setup(tmp_path, [], "", {"llama-server": Path("a"), "ik-llama-cpp": Path("b")})
    measurement = next(each for each in bar_runs.measurements() if each.name == "closed loop over HTTP")
    figures = measurement.run(setup)
    assert figures["tokens/s, 8 clients"] == Figure(1.5, "x ik-llama-cpp, 300 tokens/s")
    assert figures["ITL p99 in ms, 8 clients"].value == 80


def test_every_measurement_has_a_name_of_its_own() -> None:
    names = [measurement.name for measurement in bar_runs.measurements()]
    assert len(set(names)) == len(names)
