"""Minutes of load with faulty clients on one Tidewheel: answers stay right, memory does not grow, nothing is left.

    python load_tests/soak.py --url http://127.0.0.1:8000

Exits with 1 and says what was wrong if an answer differs from the one that the request gets alone, if the server is not
healthy and idle at the end, or if its memory keeps growing after the first quarter of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from collections.abc import Sequence

import httpx
from storm import Storm, StormError
from target import discover
from verdict import verdict

_ROUND = 200  # requests
_IDLE_TIMEOUT_S = 60


class Server:
    """The server's own view: its health, metrics and memory."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def figure(self, name: str) -> float:
        """A metric, whatever its prefix and labels. Raises StormError if there is none."""
        response = await self._client.get("/metrics")
        found = re.search(rf"^(?:\w+:)?{name}(?:\{{.*\}})? (\S+)$", response.text, re.MULTILINE)
        if found is None:
            raise StormError(f"/metrics has no {name}")
        return float(found[1])

    async def memory_mib(self) -> float:
        """Resident memory."""
        return await self.figure("process_resident_memory_bytes") / 2**20

    async def check_idle(self) -> None:
        """Raise StormError unless the server soon is healthy and holds no requests."""
        deadline = time.monotonic() + _IDLE_TIMEOUT_S
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while any(busy := {name: value for name in names if (value := await self.figure(name))}):
            if time.monotonic() > deadline:
                raise StormError(f"the server is still busy with nobody's requests: {busy}")
            await asyncio.sleep(0.2)
        health = await self._client.get("/health")
        if health.status_code != 200:
            raise StormError(f"/health says {health.status_code} {health.text}")


async def soak(options: argparse.Namespace) -> list[str]:
    """Run the storm; return what was wrong."""
    target = discover(options.url, options.api_key, options.model)
    storm = Storm(target.base_url, target.model, options.cases, options.max_tokens, options.api_key, options.seed)
    async with httpx.AsyncClient(base_url=target.base_url, headers=target.headers, timeout=60) as client:
        server = Server(client)
        await storm.learn()
        started = time.monotonic()
        steady: float | None = None
        memory = await server.memory_mib()
        while (elapsed := time.monotonic() - started) < options.seconds and not storm.wrong:
            await storm.run(_ROUND, options.concurrency)
            memory = await server.memory_mib()
            if steady is None and elapsed >= options.seconds / 4:
                await server.check_idle()
                steady = memory = await server.memory_mib()
            preemptions = await server.figure("num_preemptions_total")
            print(
                f"{time.monotonic() - started:6.0f} s  {storm.outcomes.total():8d} requests  {memory:8.1f} MiB  "
                f"{preemptions:8.0f} preemptions",
                flush=True,
            )
        await server.check_idle()
        memory = await server.memory_mib()
    print("; ".join(f"{count} {kind}" for kind, count in sorted(storm.outcomes.items())))
    wrong = list(storm.wrong)
    if steady is not None and memory - steady > options.max_growth_mib:
        wrong.append(f"memory grew from {steady:.1f} to {memory:.1f} MiB after the first quarter")
    return wrong


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is [%(default)s]")
    parser.add_argument("--seconds", type=float, default=600, help="how long the storm lasts [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=48, help="clients at a time [%(default)s]")
    parser.add_argument("--cases", type=int, default=60, help="different requests [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer [%(default)s]")
    parser.add_argument(
        "--max-growth-mib",
        type=float,
        default=32,
        help="memory that may be gained after the first quarter [%(default)s]",
    )
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="model to ask for [the first served]")
    parser.add_argument("--api-key", default=os.environ.get("API_KEY"), help="sent as a bearer token [none]")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of their clients [%(default)s]")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and say what was wrong; 1 if anything was."""
    options = parse(arguments)
    return verdict(lambda: asyncio.run(soak(options)))


if __name__ == "__main__":
    sys.exit(main())
