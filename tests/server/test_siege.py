"""The siege: each attack on the real command serving the embedded model, and the script for a few seconds."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import siege
from attack import Wire
from cores import one_core
from hostile import Attacks
from hostile_adapters import AdapterFolder
from hostile_sessions import Sessions, drip
from process_tree import processes
from saboteurs import HARMS, end_a_child, spoil_a_block
from server.conftest import ServerProcess
from storm import Storm

LARGEST = 3_000_000  # bytes; larger ones are for the script
SIZE = 6  # requests of a long session


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[siege.Besieged]:
    folder = tmp_path_factory.mktemp("siege")
    adapters = AdapterFolder(folder / "adapters", siege.DEMO)
    options = siege.server_options(folder)
    process = ServerProcess(*options, "--threads-bind", one_core(), env={**os.environ, "HF_HUB_OFFLINE": "1"})
    yield siege.Besieged(process.url, process.process.pid, folder / "kv", adapters)
    process.process.terminate()  # it ends its children then, also those that were paused
    process.process.wait(60)
    process.stop()


def test_every_endpoint_is_attacked(besieged: siege.Besieged) -> None:
    paths = httpx.get(f"{besieged.url}/openapi.json", trust_env=False).json()["paths"]
    named = [make(random.Random(0)).name for _, make in siege.attacks_on(besieged)["endpoints"]]
    assert sorted(named) == sorted(f"{method.upper()} {path}" for path, methods in paths.items() for method in methods)


# Dozens of attacks each; a few of those on what is generated try grammars for a second.
@pytest.mark.parametrize("group", ["generation", "connections", "endpoints", "adapters"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (1, 2))])
def test_every_attack_is_refused_or_served(besieged: siege.Besieged, group: str, seed: int) -> None:
    wire = Wire(besieged.url.removeprefix("http://"))
    kinds = siege.attacks_on(besieged).get(group) or Attacks(wire, LARGEST).kinds

    async def attack() -> list[str]:
        storm, rng = Storm(besieged.url, "tidewheel-demo"), random.Random(seed)
        async with httpx.AsyncClient(base_url=besieged.url, trust_env=False, timeout=60) as client:
            for _, make in kinds:
                each = make(rng)
                await storm.attack(each)
                assert (await client.get("/health")).status_code == 200, each.name
        return storm.wrong

    assert asyncio.run(attack()) == []


# Files are spoilt and processes ended meanwhile, which then have to start again.
def test_every_session_leaves_the_server_as_it_was(besieged: siege.Besieged) -> None:
    async def hold() -> list[str]:
        storm, rng, stopped = Storm(besieged.url, "tidewheel-demo", cases=4), random.Random(0), asyncio.Event()
        await storm.learn()
        steady = [storm.stream(2, stopped), drip(storm, 2, 0.01, rng, stopped)]
        meanwhile = [asyncio.ensure_future(work) for work in steady]
        async with httpx.AsyncClient(base_url=besieged.url, trust_env=False, timeout=60) as client:
            sessions = Sessions(storm, client, besieged.adapters, SIZE)
            for kind in sessions.kinds:
                await sessions.hold(kind, rng)
                for harm in HARMS:
                    spoil_a_block(besieged.kv_folder, rng, harm)
                assert (await client.get("/health")).status_code == 200, kind.__name__
            stopped.set()
            await asyncio.gather(*meanwhile)
            for number in (signal.SIGKILL, signal.SIGSTOP):
                assert end_a_child(besieged.pid, rng, number)
                await sessions.hold(sessions.structured, rng)
        return storm.wrong

    assert asyncio.run(hold()) == []
    assert len([*processes(besieged.pid)]) < 8  # all that was ended is gone


# Two servers start, one after the other.
@pytest.mark.parametrize(("requests", "streams"), [(20, 1), pytest.param(300, 4, marks=pytest.mark.sweep)])
def test_the_siege_script(capsys: pytest.CaptureFixture[str], unused_port: int, requests: int, streams: int) -> None:
    # Times are for the script itself: a machine that runs tests has others to serve.
    times = "--health-p99-ms 60000 --health-max-ms 60000 --max-growth-mib 1000 --endless 0"
    size = f"--requests {requests} --streams {streams} --batch-rows 200 --concurrency 8 --largest-body {LARGEST}"
    sessions = f"--sessions 1 --session-size {SIZE}"
    status = siege.main(["--port", str(unused_port), *times.split(), *size.split(), *sessions.split()])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert "hostile: " in captured.out
    assert "ended by SIGTERM" in captured.out
    assert "ended by SIGHUP" in captured.out


def test_a_model_whose_template_has_no_end_is_served(tmp_path: Path) -> None:
    """Except for loops, which may take long: tests/server/chat has those."""
    process = ServerProcess(str(siege.make_endless_model(tmp_path / "endless", siege.DEMO)))
    try:
        assert siege.ask_endless_model(process.url, 1, [name for name in siege.ENDLESS if name != "loops"]) == []
    finally:
        process.stop()
