"""Attacks a server: a third of its clients are hostile, and the others must notice nothing.

    python load_tests/siege.py -- --max-model-len 1024

Starts `tidewheel serve` with what follows `--` and sends it a storm of requests, with the attacks of `hostile.py` among
them, while steady streams run. Ends with 1 and says what was wrong if an answer differs from the one that the request
gets alone, if an attack gets a wrong status (such as 500), if `/health` takes too long, if memory grows from the second
third to the last, or if SIGTERM does not end the server in time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from health import HealthWatch
from hostile import Attacks
from measure import summarize
from soak import Server
from storm import Storm, StormError
from target import discover
from verdict import verdict

import tidewheel

# The file and not `-m tidewheel`, which would look for the package in the current folder first.
_PROGRAM = str(Path(tidewheel.__file__).with_name("__main__.py"))
_START_TIMEOUT_S = 120
_EXIT_TIMEOUT_S = 40  # its --shutdown-timeout of 30 s, and some
_ROUND = 500  # requests
_BATCHES = 3


def processes(pid: int) -> Iterator[int]:
    """The process and all that it has started."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from processes(int(child))


def memory_mib(pid: int) -> float:
    """Resident memory of the process and of all that it has started; what they share counts once."""
    total = 0
    for each in processes(pid):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


async def besiege(url: str, pid: int, args: argparse.Namespace) -> list[str]:
    """Run the storm with its attacks; return what was wrong."""
    target = discover(url, None, None)
    attacks = Attacks(target.base_url.removeprefix("http://"), size=args.largest_body)
    storm = Storm(target.base_url, target.model, seed=args.seed, attacks=attacks, hostile_share=args.hostile)
    await storm.learn()
    await _start_batches(target.base_url, args.batch_rows)
    stopped = asyncio.Event()
    steady = asyncio.create_task(storm.stream(args.streams, stopped))
    watch = await asyncio.to_thread(HealthWatch, target.base_url, target.headers, 0.02)
    began, memory = time.monotonic(), list[float]()
    for sent in range(0, args.requests, _ROUND):
        await storm.run(min(_ROUND, args.requests - sent), args.concurrency)
        memory.append(memory_mib(pid))
        passed = f"{time.monotonic() - began:6.0f} s  {storm.outcomes.total():6d} requests"
        print(f"{passed}  {memory[-1]:7.1f} MiB  {len(storm.wrong)} wrong", flush=True)
    latencies = await asyncio.to_thread(watch.stop)
    stopped.set()
    await steady
    async with httpx.AsyncClient(base_url=target.base_url, timeout=60) as client:
        await Server(client).check_idle()
    # The least of a third: what a large body takes while it is there is no growth.
    third, health = len(memory) // 3, summarize(latencies)
    before, after = min(memory[third : 2 * third] or memory), min(memory[2 * third :])
    print("; ".join(f"{count} {kind}" for kind, count in sorted(storm.outcomes.items())))
    print(f"/health in ms: {health}; least memory {before:.1f} MiB in the second third, {after:.1f} MiB in the last")
    wrong = storm.wrong
    if after - before > args.max_growth_mib:
        wrong.append(f"memory grew from {before:.1f} to {after:.1f} MiB between the second and the last third")
    for figure, most in (("p99", args.health_p99_ms), ("max", args.health_max_ms)):
        if health[figure] > most:
            wrong.append(f"/health: {figure} {health[figure]} ms, more than {most}")
    return wrong


async def _start_batches(url: str, rows: int) -> None:
    """Batches of requests that fail at once: they must leave the event loop to others."""
    row = {"method": "POST", "url": "/v1/completions", "body": {"unknown": 1, "priority": -(10**6)}}
    content = "".join(json.dumps({"custom_id": str(i), **row}) + "\n" for i in range(rows))
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        form = {"file": ("in.jsonl", content.encode())}
        file = (await client.post("/v1/files", files=form, data={"purpose": "batch"})).raise_for_status().json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        for _ in range(_BATCHES):
            (await client.post("/v1/batches", json=body)).raise_for_status()


def serve_and_besiege(args: argparse.Namespace) -> list[str]:
    """Start a server, besiege it, end it; return what was wrong."""
    url = f"http://127.0.0.1:{args.port}"
    with tempfile.TemporaryDirectory() as folder:
        return _besiege_with(url, ["--batch-dir", folder], args)


def _besiege_with(url: str, options: Sequence[str], args: argparse.Namespace) -> list[str]:
    command = [sys.executable, _PROGRAM, "serve", "--port", str(args.port), *options, *args.server]
    with open(args.log, "w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            _await_health(url, process)
            wrong = asyncio.run(besiege(url, process.pid, args))
            process.send_signal(signal.SIGTERM)
            asked = time.monotonic()
            try:
                code = process.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return [*wrong, f"SIGTERM has not ended the server after {_EXIT_TIMEOUT_S} s"]
            print(f"ended by SIGTERM after {time.monotonic() - asked:.1f} s with {code}")
            return wrong if code == 0 else [*wrong, f"the server ended with {code}"]
        finally:
            process.kill()


def _await_health(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            httpx.get(f"{url}/health").raise_for_status()
            return
        except httpx.HTTPError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise StormError(f"the server does not start: {error}") from error
            time.sleep(0.05)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("server", nargs="*", help="options of `tidewheel serve`, after --")
    parser.add_argument("--port", type=int, default=8123, help="where it listens [%(default)s]")
    parser.add_argument("--requests", type=int, default=20_000, help="how many are sent [%(default)s]")
    parser.add_argument("--hostile", type=float, default=1 / 3, help="share that is hostile [%(default).2f]")
    parser.add_argument("--streams", type=int, default=32, help="steady streams beside them [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=16, help="other clients at a time [%(default)s]")
    parser.add_argument("--batch-rows", type=int, default=20_000, help="of each batch that fails [%(default)s]")
    parser.add_argument("--largest-body", type=int, default=16_000_000, help="bytes of the largest [%(default)s]")
    parser.add_argument("--health-p99-ms", type=float, default=50, help="what /health may take [%(default)s]")
    parser.add_argument("--health-max-ms", type=float, default=250, help="what it may ever take [%(default)s]")
    parser.add_argument("--max-growth-mib", type=float, default=32, help="of memory, between thirds [%(default)s]")
    parser.add_argument("--log", default=os.devnull, help="file for the server's log [none]")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and their clients [%(default)s]")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and say what was wrong; 1 if anything was."""
    options = parse(arguments)
    return verdict(lambda: serve_and_besiege(options))


if __name__ == "__main__":
    sys.exit(main())
