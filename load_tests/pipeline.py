"""Measures hops between a pipeline's stages, and calculates what pipelines of larger machines would reach.

    .venv/bin/python load_tests/pipeline.py hops --url http://127.0.0.1:8000
    .venv/bin/python load_tests/pipeline.py paper --hop-us 90

The first requests one answer after another from a server with a pipeline, and reads its metrics meanwhile. The second
calculates what a step has to read, compute and send: each stage takes as long as the longest of the three, stages work
on different requests at a time, and one request goes through all of them, one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from replicas import Client

from tidewheel.server.commands.bench import text

_LOOK_S = 0.2
_HOPS = "tidewheel:pipeline_stage_hops_total"
_SECONDS = "tidewheel:pipeline_stage_hop_seconds_total"
_CHUNK = 128  # tokens of a prompt that go through the stages together
_ROW_BYTES = 4  # bytes of a hidden value


class Model(NamedTuple):
    """The number of parameters (each token is multiplied by all), the bytes of one, and the size of a hidden row."""

    parameters: float
    bytes_each: float
    hidden: int


class Machine(NamedTuple):
    """What a machine reads and computes per second, its network's bits per second, and the seconds of an empty hop."""

    memory: float
    operations: float
    network: float
    hop: float


def stage_s(model: Model, machine: Machine, stages: int, rows: int) -> float:
    """Seconds that a stage takes to read and to compute a step of `rows` tokens."""
    share = model.parameters / stages
    return max(share * model.bytes_each / machine.memory, 2 * share * rows / machine.operations)


def sending_s(model: Model, machine: Machine, rows: int) -> float:
    """Seconds that the network takes to send them to the next stage."""
    return 8 * rows * model.hidden * _ROW_BYTES / machine.network


def decode(model: Model, machine: Machine, stages: int, streams: int) -> float:
    """Tokens a second of `streams` streams."""
    rows = -(-streams // stages)
    computing = stage_s(model, machine, stages, rows)
    if stages == 1:
        return streams / computing
    sending = sending_s(model, machine, rows)
    around = stages * (computing + sending + machine.hop)  # before a stream's next token can begin
    steps = min(stages, streams)  # at a time
    return streams / max(around, steps * max(computing, sending))


def prefill(model: Model, machine: Machine, stages: int) -> float:
    """Prompt tokens per second. Chunks of the prompts follow each other through the stages."""
    computing = stage_s(model, machine, stages, _CHUNK)
    return _CHUNK / (computing if stages == 1 else max(computing, sending_s(model, machine, _CHUNK)))


def network_takes_over(model: Model, machine: Machine) -> float:
    """The smallest number of stages with which sending a chunk takes longer than computing it."""
    return stage_s(model, machine, 1, _CHUNK) / sending_s(model, machine, _CHUNK)


def _paper(given: argparse.Namespace) -> str:
    model = Model(given.parameters * 1e9, given.bits / 8, given.hidden)
    machine = Machine(given.memory * 1e9, given.operations * 1e12, given.network * 1e9, given.hop_us * 1e-6)
    rows = [["machines", "prefill", *(f"decode {streams}" for streams in given.streams)]]
    for stages in given.machines:
        rates = [prefill(model, machine, stages), *(decode(model, machine, stages, n) for n in given.streams)]
        rows.append([str(stages), *(f"{rate:.1f}" for rate in rates)])
    most = network_takes_over(model, machine)
    return text.table(rows) + f"sending a chunk takes longer than computing it from {most:.0f} machines on\n"


def _hops(given: argparse.Namespace) -> str:
    done = threading.Event()
    worker = threading.Thread(target=_keep_busy, args=(given.url, done))
    worker.start()
    try:
        taken = sorted(_hop_means(given.url, given.seconds))
    finally:
        done.set()
        worker.join()
    if not taken:
        raise SystemExit(f"no hops are counted at {given.url}/metrics: is there a server with a pipeline?")
    return (
        f"a hop: p50 {statistics.median(taken) * 1e6:.0f} us, {taken[0] * 1e6:.0f} to {taken[-1] * 1e6:.0f}, "
        f"means of {_LOOK_S} s each\n"
    )


def _keep_busy(url: str, done: threading.Event) -> None:
    client = Client(url)
    while not done.is_set():
        client.ask({"prompt": "A story", "max_tokens": 64, "ignore_eos": True})


def _hop_means(url: str, seconds: float) -> Iterator[float]:
    """The mean seconds of a hop in consecutive short intervals."""
    until, before = time.monotonic() + seconds, _totals(url)
    while time.monotonic() < until:
        time.sleep(_LOOK_S)
        now = _totals(url)
        if now[0] > before[0]:
            yield (now[1] - before[1]) / (now[0] - before[0])
        before = now


def _totals(url: str) -> tuple[float, float]:
    """All hops so far, and their seconds."""
    totals = {_HOPS: 0.0, _SECONDS: 0.0}
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        for line in response.read().decode().splitlines():
            if (name := line.partition("{")[0]) in totals:
                totals[name] += float(line.rpartition(" ")[2])
    return totals[_HOPS], totals[_SECONDS]


def _numbers(given: str) -> list[int]:
    return [int(number) for number in given.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Hops between stages, and pipelines on paper.")
    ways = parser.add_subparsers(required=True)
    hops = ways.add_parser("hops", help="measure a server")
    hops.add_argument("--url", required=True)
    hops.add_argument("--seconds", type=float, default=10, help="of measuring [10]")
    hops.set_defaults(run=_hops)
    paper = ways.add_parser("paper", help="count")
    paper.add_argument("--parameters", type=float, default=70, help="10^9 [70]")
    paper.add_argument("--bits", type=float, default=4.5, help="of a parameter, with its scale [4.5]")
    paper.add_argument("--hidden", type=int, default=8192, help="values of a token between two layers [8192]")
    paper.add_argument("--machines", type=_numbers, default=[1, 2, 4, 8], metavar="N,...", help="[1,2,4,8]")
    paper.add_argument("--streams", type=_numbers, default=[1, 8, 32, 128], metavar="N,...", help="[1,8,32,128]")
    paper.add_argument("--memory", type=float, default=200, help="GB/s that a machine reads [200]")
    paper.add_argument("--operations", type=float, default=5, help="10^12 a second of a machine [5]")
    paper.add_argument("--network", type=float, default=10, help="Gbit/s [10]")
    paper.add_argument("--hop-us", type=float, required=True, help="a hop without its bytes, as measured")
    paper.set_defaults(run=_paper)
    given = parser.parse_args(arguments)
    print(given.run(given), end="")


if __name__ == "__main__":
    main()
