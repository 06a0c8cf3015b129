"""The simulation of routing policies says what they are for."""

from __future__ import annotations

import pytest
import routing_simulation


def test_prefixes_are_found_and_the_load_is_even(capsys: pytest.CaptureFixture[str]) -> None:
    routing_simulation.main(["--replicas", "50", "--conversations", "3000"])
    rows = [line.rsplit(maxsplit=4) for line in capsys.readouterr().out.splitlines()[2:]]
    hits = {name.strip(): float(cached.rstrip("%")) for name, cached, *_ in rows}
    peaks = {name.strip(): float(peak) for name, _, _, peak, _ in rows}
    assert hits["prefix, session ids"] > hits["hash"] > hits["power of two"] + 10
    assert hits["prefix, no session ids"] > hits["hash"] > hits["hash, bounded load"]
    assert peaks["prefix, session ids"] < 1.75 < peaks["hash"]
