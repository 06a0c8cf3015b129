"""The siege: each attack on the real command serving the embedded model, and the script for a few seconds."""

from __future__ import annotations

import asyncio
import random

import pytest
import siege
from hostile import Attacks
from server.conftest import ServerProcess, is_healthy
from storm import Storm

LARGEST = 3_000_000  # bytes; larger ones are for the script


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.sweep)])
def test_every_attack_is_refused_or_served(demo_server: ServerProcess, seeds: int) -> None:
    async def attack() -> list[str]:
        storm = Storm(demo_server.url, "tidewheel-demo")
        attacks = Attacks(f"127.0.0.1:{demo_server.port}", size=LARGEST)
        for seed in range(seeds):
            for each in attacks.all(random.Random(seed)):
                await storm.attack(each)
                assert is_healthy(demo_server.url), each.name
        return storm.wrong

    assert asyncio.run(attack()) == []


@pytest.mark.parametrize(("requests", "streams"), [(20, 1), pytest.param(300, 4, marks=pytest.mark.sweep)])
def test_the_siege_script(capsys: pytest.CaptureFixture[str], unused_port: int, requests: int, streams: int) -> None:
    # Times are for the script itself: a machine that runs tests has others to serve.
    times = ["--health-p99-ms", "60000", "--health-max-ms", "60000", "--max-growth-mib", "1000"]
    size = [
        "--requests",
        str(requests),
        "--streams",
        str(streams),
        "--batch-rows",
        "200",
        "--concurrency",
        "8",
        "--largest-body",
        str(LARGEST),
    ]
    status = siege.main(["--port", str(unused_port), *times, *size])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert "hostile: " in captured.out
    assert "ended by SIGTERM" in captured.out
