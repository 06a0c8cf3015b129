"""Attacks a server: a third of its clients are hostile, and the others must not be affected.

    python load_tests/siege.py -- --max-model-len 1024

Starts `tidewheel serve` with the options after `--` and sends it many requests, among them the attacks of `hostile.py`
and its neighbours. Meanwhile steady streams and sessions of `hostile_sessions.py` run, and `saboteurs.py` damages files
and kills processes. Exits with 1 and says what was wrong if an answer differs from the one that the request gets alone,
if an attack gets a wrong status (such as 500), if `/health` takes too long, if memory grows from the second third to
the last, or if SIGTERM does not end the server in time. Then a server with an endless chat template must also keep
working, and end by SIGHUP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
from attack import CHAT, Kinds, Wire
from health import Answer, HealthWatch
from hostile import Attacks
from hostile_adapters import AdapterFolder
from hostile_endpoints import endpoint_attacks
from hostile_http import http_attacks
from hostile_sessions import Sessions, drip
from measure import summarize
from process_tree import memory_mib
from saboteurs import sabotage
from served import served
from soak import Server
from storm import Storm
from target import discover
from verdict import verdict

import tidewheel

_ROUND = 500  # requests
_ANSWER_TIMEOUT_S = 120
_BATCHES = 3
_DRIP_PAUSE_S = 3.0
_SLOWEST = 8  # answers of /health, reported with what was done meanwhile
_NO_LIMITS = httpx.Limits(max_connections=None)
DEMO = Path(tidewheel.__file__).with_name("server") / "demo"
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "text": "{% set a = 'a' * 999 %}" + "{% set a = a ~ a %}" * 40 + "{{ a }}",
    "block": "{% set a = 'a' * 999 %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 40 + "{{ a }}",
    "lists": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 40 + "{{ a }}",
    "numbers": "{{ 9 ** (9 ** 9) }}",
    "padding": "{{ '%99999999999d' % 1 }}{{ todo.center(99999999999) }}",
}


class Besieged(NamedTuple):
    """A server that is attacked: its process, and the folders that it and its attackers use."""

    url: str
    pid: int
    kv_folder: Path
    adapters: AdapterFolder


def server_options(folder: Path) -> list[str]:
    """Options that enable everything that can be attacked. The server's data is in `folder`."""
    options = (
        f"--batch-dir {folder / 'batches'} --kv-offload {folder / 'kv'} --kv-cache-space 0.05 --kv-offload-space 1"
    )
    # Small caches, so that filling them once does not look like growth.
    loras = "--enable-lora --allow-runtime-lora-updating --max-loras 2 --max-cpu-loras 4 --max-stored-responses 100"
    return f"{options} {loras} --trust-request-chat-template".split()


def attacks_on(besieged: Besieged) -> dict[str, Kinds]:
    """The attacks other than those on generation, by their target."""
    wire = Wire(besieged.url.removeprefix("http://"))
    document = httpx.get(f"{besieged.url}/openapi.json", trust_env=False).raise_for_status().json()
    return {
        "connections": http_attacks(wire),
        "endpoints": endpoint_attacks(wire, document),
        "adapters": besieged.adapters.attacks(wire),
    }


async def besiege(besieged: Besieged, args: argparse.Namespace) -> list[str]:
    """Run the storm with all attacks; return what was wrong."""
    target, rng = discover(besieged.url, None, None), random.Random(args.seed)
    more = [kind for kinds in attacks_on(besieged).values() for kind in kinds]
    attacks = Attacks(Wire(target.base_url.removeprefix("http://")), args.largest_body, more)
    storm = Storm(target.base_url, target.model, seed=args.seed, attacks=attacks, hostile_share=args.hostile)
    await storm.learn()
    await _start_batches(target.base_url, args.batch_rows)
    stopped = asyncio.Event()
    async with httpx.AsyncClient(base_url=target.base_url, timeout=60, limits=_NO_LIMITS) as client:
        sessions = Sessions(storm, client, besieged.adapters, args.session_size)
        meanwhile = [
            asyncio.ensure_future(work)
            for work in (
                storm.stream(args.streams, stopped),
                sessions.run(args.sessions, rng, stopped),
                drip(storm, args.streams, _DRIP_PAUSE_S, rng, stopped),
                sabotage(besieged.pid, besieged.kv_folder, rng, stopped),
            )
        ]
        watch = await asyncio.to_thread(HealthWatch, target.base_url, target.headers, 0.02, besieged.pid)
        began, memory = time.monotonic(), list[float]()
        for sent in range(0, args.requests, _ROUND):
            await storm.run(min(_ROUND, args.requests - sent), args.concurrency)
            memory.append(memory_mib(besieged.pid))
            passed = f"{time.monotonic() - began:6.0f} s  {storm.outcomes.total():6d} requests"
            print(f"{passed}  {memory[-1]:7.1f} MiB  {len(storm.wrong)} wrong", flush=True)
        latencies = await asyncio.to_thread(watch.stop)
        stopped.set()
        await asyncio.gather(*meanwhile)
        server = Server(client)
        await server.check_idle()
        if not await server.figure("kv_offload_on"):
            storm.wrong.append("the KV folder is not used any more")
    # The minimum of each third, because the memory of a large body in progress is not growth.
    third, health = len(memory) // 3, summarize(latencies)
    before, after = min(memory[third : 2 * third] or memory), min(memory[2 * third :])
    print("; ".join(f"{count} {kind}" for kind, count in sorted(storm.outcomes.items())))
    print(f"/health in ms: {health}; least memory {before:.1f} MiB in the second third, {after:.1f} MiB in the last")
    for asked, latency, ran, waited in sorted(watch.answers, key=_held_up_ms, reverse=True)[:_SLOWEST]:
        until = asked + latency / 1e3
        kinds = sorted({kind for start, end, kind in storm.done if start < until and end > asked and ":" in kind})
        times = f"{latency:.0f} ms, of which it ran for {ran:.0f} and waited for a core for {waited:.0f}"
        print(f"/health took {times}, beside {', '.join(kinds) or 'nothing hostile'}")
    wrong = storm.wrong
    if after - before > args.max_growth_mib:
        wrong.append(f"memory grew from {before:.1f} to {after:.1f} MiB between the second and the last third")
    for figure, most in (("p99", args.health_p99_ms), ("max", args.health_max_ms)):
        if health[figure] > most:
            wrong.append(f"/health: {figure} {health[figure]} ms, more than {most}")
    return wrong


def _held_up_ms(answer: Answer) -> float:
    """The answer's time without waiting for a core, which is not the server's fault."""
    return answer.latency_ms - answer.waited_ms


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
    """Start servers, attack them, end them; return what was wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapters = AdapterFolder(folder / "adapters", args.model or DEMO)
        model = [str(args.model)] if args.model else []
        with served([*model, *server_options(folder), *args.server], args.port, args.log) as (url, process, wrong):
            wrong += asyncio.run(besiege(Besieged(url, process.pid, folder / "kv", adapters), args))
        endless = make_endless_model(folder / "endless", args.model or DEMO)
        with served([str(endless), *args.server], args.port, args.log, signal.SIGHUP) as (url, _, more):
            more += ask_endless_model(url, args.endless)
    return [*wrong, *more]


def make_endless_model(folder: Path, model: Path) -> Path:
    """A copy of a model folder with an endless chat template, which does what the last message says."""
    shutil.copytree(model, folder)
    template = "{% set todo = messages[-1].content %}{{ todo }}" + "".join(
        f"{{% if {name!r} in todo %}}{harm}{{% endif %}}" for name, harm in ENDLESS.items()
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder


def ask_endless_model(url: str, times: int, names: Collection[str] = tuple(ENDLESS)) -> list[str]:
    """Send `times` requests for such endless work, all at once; return what was wrong."""
    wrong = []

    def ask(name: str) -> None:
        body = {"messages": [{"role": "user", "content": name}], "max_tokens": 1}
        status = httpx.post(f"{url}{CHAT}", json=body, timeout=_ANSWER_TIMEOUT_S, trust_env=False).status_code
        if status != (200 if name == "nothing" else 400):
            wrong.append(f"a chat template that is to do {name} was answered with {status}")

    watch = HealthWatch(url, {}, 0.02)
    with ThreadPoolExecutor(len(ENDLESS) + 1) as pool:
        list(pool.map(ask, [name for name in (*names, "nothing") for _ in range(times)]))
    print(f"/health in ms beside endless templates: {summarize(watch.stop())}")
    return wrong


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("server", nargs="*", help="options of `tidewheel serve`, after --")
    parser.add_argument("--model", type=Path, help="folder of the model to serve [the built-in one]")
    parser.add_argument("--port", type=int, default=8123, help="where it listens [%(default)s]")
    parser.add_argument("--requests", type=int, default=20_000, help="how many are sent [%(default)s]")
    parser.add_argument("--hostile", type=float, default=1 / 3, help="share that is hostile [%(default).2f]")
    parser.add_argument("--streams", type=int, default=32, help="steady streams beside them [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=16, help="other clients at a time [%(default)s]")
    parser.add_argument("--sessions", type=int, default=4, help="sessions at a time [%(default)s]")
    parser.add_argument("--session-size", type=int, default=30, help="requests of a long one [%(default)s]")
    parser.add_argument("--endless", type=int, default=2, help="times that each endless template runs [%(default)s]")
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
