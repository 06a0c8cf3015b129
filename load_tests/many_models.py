"""Minutes of load on several models of one server: answers stay right, and memory comes back when all are unloaded.

    python load_tests/many_models.py --embedding texts -- --model a=./a.gguf --model b=./b --model texts=./minilm

Starts `tidewheel serve` with the options after `--`. Each model has clients of its own, some of which misbehave. At
most `--loaded` models are loaded at a time, so all are unloaded and loaded again many times. Exits with 1 and says what
was wrong if an answer differs from the one that the request gets alone, if models are not unloaded at the end, if the
server then has more memory than before, or if SIGTERM does not end it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import httpx
from process_tree import memory_mib
from served import served
from storm import Storm, StormError
from target import WORDS
from verdict import verdict

_ROUND = 10  # requests to each model
_IDLE_S = 1.0  # after which the server unloads a model
_UNLOAD_TIMEOUT_S = 120
_SETTLE_S = 30.0  # in which freed memory goes back to the system
_TIMEOUT_S = 120  # of a request, which may wait for other models


class Clients(Protocol):
    """The clients of one model. `wrong` says what was wrong, and `outcomes` counts what they did."""

    outcomes: Counter[str]
    wrong: list[str]

    async def learn(self) -> None:
        """Get the answers that are right."""

    async def run(self, requests: int, concurrency: int) -> None:
        """Send `requests` requests, `concurrency` at a time, and compare their answers."""


class Embedders:
    """Clients that embed texts, alone and several at a time."""

    def __init__(self, client: httpx.AsyncClient, model: str, cases: int, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._client, self._model, self._rng = client, model, random.Random(seed)
        self._texts = [" ".join(self._rng.choices(WORDS, k=self._rng.randint(1, 60))) for _ in range(cases)]
        self._alone: list[Any] = []

    async def learn(self) -> None:
        """See Clients."""
        self._alone = [vector for text in self._texts for vector in await self._embed([text])]

    async def run(self, requests: int, concurrency: int) -> None:
        """See Clients."""
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                chosen = self._rng.choices(range(len(self._texts)), k=self._rng.randint(1, 8))
                if await self._embed([self._texts[i] for i in chosen]) != [self._alone[i] for i in chosen]:
                    self.wrong.append(f"{self._model}: other vectors than alone for texts {chosen}")
                self.outcomes["embedded"] += 1

        await asyncio.gather(*(client() for _ in range(concurrency)))

    async def _embed(self, texts: Sequence[str]) -> list[Any]:
        answer = await self._client.post("/v1/embeddings", json={"model": self._model, "input": texts})
        if answer.status_code != 200:
            raise StormError(f"{self._model}: {answer.status_code} {answer.text[:300]}")
        return [item["embedding"] for item in answer.json()["data"]]


class Watch:
    """Counts how often models are loaded, and how many are at a time."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.loads: Counter[str] = Counter()
        self.most_loaded = 0
        self._loaded: set[str] = set()

    async def look(self) -> dict[str, str]:
        """The state of each model."""
        cards = (await self._client.get("/v1/models")).raise_for_status().json()["data"]
        states = {card["id"]: card["status"]["value"] for card in cards}
        loaded = {name for name, state in states.items() if state == "loaded"}
        self.loads.update(loaded - self._loaded)
        self.most_loaded = max(self.most_loaded, len(loaded))
        self._loaded = loaded
        return states

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await self.look()
            await asyncio.sleep(0.1)

    async def all_unloaded(self) -> None:
        """Wait for the server to unload all models. Raises StormError if it takes too long."""
        deadline = time.monotonic() + _UNLOAD_TIMEOUT_S
        while {*(states := await self.look()).values()} != {"unloaded"}:
            if time.monotonic() > deadline:
                raise StormError(f"nobody uses the models, but they are {states}")
            await asyncio.sleep(0.1)


async def settled_mib(pid: int, most: float) -> float:
    """The process's memory as soon as it is not above `most`, or after a while."""
    deadline = time.monotonic() + _SETTLE_S
    while (memory := memory_mib(pid)) > most and time.monotonic() < deadline:  # noqa: ASYNC110 (another process's)
        await asyncio.sleep(0.5)
    return memory


async def soak(url: str, pid: int, options: argparse.Namespace) -> list[str]:
    """Run the storms; return what was wrong."""
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as client:
        watch = Watch(client)
        storms: dict[str, Clients] = {
            name: Embedders(client, name, options.cases, options.seed)
            if name in options.embedding
            else Storm(url, name, options.cases, options.max_tokens, seed=options.seed)
            for name in await watch.look()
        }
        watching = asyncio.create_task(watch.run())
        for clients in storms.values():
            await clients.learn()
        await asyncio.gather(*(clients.run(_ROUND, options.concurrency) for clients in storms.values()))
        await watch.all_unloaded()
        before = memory_mib(pid)
        print(f"{'':8}  {'':>16}  {before:8.1f} MiB without models", flush=True)
        started = time.monotonic()

        async def storm(clients: Clients) -> None:
            while time.monotonic() - started < options.seconds and not clients.wrong:
                await clients.run(_ROUND, options.concurrency)

        async def report() -> None:
            while True:
                await asyncio.sleep(options.seconds / 20)
                sent = sum(clients.outcomes.total() for clients in storms.values())
                passed = f"{time.monotonic() - started:6.0f} s  {sent:7d} requests  {memory_mib(pid):8.1f} MiB"
                print(f"{passed}  {watch.loads.total():5d} loads", flush=True)

        reporting = asyncio.create_task(report())
        try:
            await asyncio.gather(*map(storm, storms.values()))
            await watch.all_unloaded()
        finally:
            reporting.cancel()
            watching.cancel()
        after = await settled_mib(pid, before + options.max_growth_mib)
        print(f"{'':8}  {'':>16}  {after:8.1f} MiB without models")
    for name, clients in storms.items():
        told = "; ".join(f"{count} {kind}" for kind, count in sorted(clients.outcomes.items()))
        print(f"{name}: loaded {watch.loads[name]} times; {told}")
    wrong = [f"{name}: {what}" for name, clients in storms.items() for what in clients.wrong]
    if after - before > options.max_growth_mib:
        wrong.append(f"without models, memory grew from {before:.1f} to {after:.1f} MiB")
    if watch.most_loaded > options.loaded:
        wrong.append(f"{watch.most_loaded} models were loaded at a time, not {options.loaded}")
    if len(storms) > options.loaded and not watch.loads.total() > len(storms):
        wrong.append(f"models made no room for each other: {dict(watch.loads)}")
    return wrong


def serve_and_soak(options: argparse.Namespace) -> list[str]:
    """Start the server, load it, end it; return what was wrong."""
    hosting = f"--max-loaded-models {options.loaded} --model-idle-timeout {_IDLE_S}".split()
    with served([*hosting, *options.server], options.port, options.log) as (url, process, wrong):
        wrong += asyncio.run(soak(url, process.pid, options))
    return wrong


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("server", nargs="+", help="options of `tidewheel serve`, after --, which name the models")
    parser.add_argument(
        "--embedding", action="append", default=[], metavar="NAME", help="a model that embeds texts; may be repeated"
    )
    parser.add_argument("--loaded", type=int, default=2, help="models that are loaded at a time [%(default)s]")
    parser.add_argument("--port", type=int, default=8123, help="where it listens [%(default)s]")
    parser.add_argument("--seconds", type=float, default=600, help="how long the storms last [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=8, help="clients of each model at a time [%(default)s]")
    parser.add_argument("--cases", type=int, default=30, help="different requests to each [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=24, help="longest answer [%(default)s]")
    parser.add_argument(
        "--max-growth-mib", type=float, default=32, help="memory that may be gained without models [%(default)s]"
    )
    parser.add_argument("--log", default=os.devnull, help="file for the server's log [none]")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of their clients [%(default)s]")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and say what was wrong; 1 if anything was."""
    options = parse(arguments)
    return verdict(lambda: serve_and_soak(options))


if __name__ == "__main__":
    sys.exit(main())
