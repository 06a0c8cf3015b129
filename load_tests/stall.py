"""How long prompts and large pictures affect the streams that are already running.

Steady streams decode, and long prompts arrive all at once, or questions about pictures. How long do the steady streams
pause, and how soon do the new requests get their first text? Then many streams decode while `/health` is requested
repeatedly.

    python load_tests/stall.py --url http://127.0.0.1:8000 --json stall.json
    python load_tests/stall.py --url http://127.0.0.1:8000 --pictures 4
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from health import HealthWatch
from measure import StreamError, StreamTimer, summarize, table
from target import Target, TargetError, discover

# A steady stream counts as running after this many pieces of text.
_WARM_CHUNKS = 4
_WARM_TIMEOUT_SECONDS = 120
_QUESTION = "What is in this picture?"


@dataclass
class SteadyStreams:
    """Streams that decode until they are stopped. When an answer ends, another request follows."""

    client: httpx.AsyncClient
    target: Target
    count: int
    prompt_tokens: int
    max_tokens: int
    timers: list[StreamTimer] = field(default_factory=list)

    @asynccontextmanager
    async def running(self, seed: int) -> AsyncIterator[None]:
        """Enters when every stream is running, and stops them at the end. A stream that fails ends the run."""
        tasks = [asyncio.create_task(self._keep_streaming(random.Random(seed + i))) for i in range(self.count)]
        try:
            await self._wait_until_warm(tasks)
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def gaps_ms(self, since: float, until: float) -> list[float]:
        """The gaps between texts of all streams that overlap the given time, in milliseconds."""
        return [
            (after - before) * 1e3
            for timer in self.timers
            for before, after in pairwise(timer.arrivals)
            if after > since and before < until
        ]

    async def observe(self, seconds: float, since: float) -> None:
        """Wait for this time, and on a busy machine until there is a gap after `since`."""
        await asyncio.sleep(seconds)
        while not self.gaps_ms(since, time.perf_counter()):  # noqa: ASYNC110 (streams set no event)
            await asyncio.sleep(0.01)

    async def _wait_until_warm(self, tasks: list[asyncio.Task[None]]) -> None:
        deadline = time.perf_counter() + _WARM_TIMEOUT_SECONDS
        while sum(len(timer.arrivals) >= _WARM_CHUNKS for timer in self.timers) < self.count:
            done, _ = await asyncio.wait(tasks, timeout=0.01, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if time.perf_counter() > deadline:
                raise StreamError(f"not all {self.count} streams were running after {_WARM_TIMEOUT_SECONDS} seconds")

    async def _keep_streaming(self, rng: random.Random) -> None:
        while True:
            prompt = self.target.prompt(self.prompt_tokens, rng)
            timer = StreamTimer(time.perf_counter())
            self.timers.append(timer)
            request = Request.of(self.target.completion(prompt, self.max_tokens, ignore_eos=True))
            await stream(self.client, request, timer)


@dataclass(frozen=True)
class Request:
    """A request that is encoded before its time: the client must not be busy with pictures while it reads streams."""

    path: str
    content: bytes

    @classmethod
    def of(cls, body: dict[str, Any]) -> Request:
        """The request of a body of `Target`."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return cls(path, json.dumps(body).encode())


async def stream(client: httpx.AsyncClient, request: Request, timer: StreamTimer) -> StreamTimer:
    """Stream the answer to a request into `timer`.

    Raises StreamError if the server refuses, reports an error or ends early.
    """
    headers = {"content-type": "application/json"}
    async with client.stream("POST", request.path, content=request.content, headers=headers) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise StreamError(f"status {response.status_code}: {text[:300]}")
        async for chunk in response.aiter_raw():
            timer.feed(chunk, time.perf_counter())
    timer.finish()
    return timer


def newcomers_of(target: Target, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The requests that arrive: long prompts, or questions about one new picture each."""
    rng = random.Random(args.seed + 10_000)
    if not args.pictures:
        return [
            target.completion(target.prompt(args.long_prompt_tokens, rng), args.long_max_tokens, ignore_eos=True)
            for _ in range(args.long_prompts)
        ]
    from vision_shapes import picture

    bodies = []
    width, height = args.picture_size
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.pictures):
            data = base64.b64encode(picture(Path(folder), width, height, args.seed + turn).read_bytes()).decode()
            image = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
            content: list[dict[str, Any]] = [image, {"type": "text", "text": _QUESTION}]
            bodies.append(target.chat(content, args.long_max_tokens, ignore_eos=True))
    return bodies


async def measure_stall(client: httpx.AsyncClient, target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Let long prompts or pictures arrive while streams run. Times in milliseconds."""
    steady = SteadyStreams(client, target, args.streams, args.prompt_tokens, args.max_tokens)
    arriving = [Request.of(body) for body in newcomers_of(target, args)]
    async with steady.running(args.seed):
        quiet_from = time.perf_counter()
        await steady.observe(args.quiet_seconds, quiet_from)
        arrival = time.perf_counter()
        newcomers = await asyncio.gather(*(stream(client, request, StreamTimer(arrival)) for request in arriving))
        last_first_text = max(timer.arrivals[0] for timer in newcomers)
        # The gap during which the last prompt finished ends only with the next text.
        await steady.observe(args.quiet_seconds, arrival)
    return {
        "pictures": args.pictures,
        "newcomer_prompt_tokens": [timer.prompt_tokens for timer in newcomers],
        "steady_itl_before_ms": summarize(steady.gaps_ms(quiet_from, arrival)),
        "steady_itl_while_prompts_run_ms": summarize(steady.gaps_ms(arrival, last_first_text)),
        "newcomer_ttft_ms": summarize([timer.ttft_ms for timer in newcomers]),
    }


async def measure_health(client: httpx.AsyncClient, target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Request `/health` repeatedly while streams decode. Times in milliseconds."""
    steady = SteadyStreams(client, target, args.health_streams, args.prompt_tokens, args.max_tokens)
    async with steady.running(args.seed + 20_000):
        watch = await asyncio.to_thread(HealthWatch, target.base_url, target.headers, args.health_interval)
        since = time.perf_counter()
        await steady.observe(args.health_seconds, since)
        latencies = await asyncio.to_thread(watch.stop)
        gaps = steady.gaps_ms(since, time.perf_counter())
    return {"health_ms": summarize(latencies), "itl_with_health_streams_ms": summarize(gaps)}


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both scenarios against one server. Raises TargetError, StreamError or httpx.HTTPError."""
    target = discover(args.url, args.api_key, args.model)
    async with httpx.AsyncClient(
        base_url=target.base_url,
        headers=target.headers,
        limits=httpx.Limits(max_connections=None),
        timeout=httpx.Timeout(args.timeout),
    ) as client:
        result = {"url": target.base_url, "model": target.model, "streams": args.streams}
        result |= await measure_stall(client, target, args)
        if args.health_streams:
            result |= {"health_streams": args.health_streams, **await measure_health(client, target, args)}
    return result


def report(result: dict[str, Any]) -> str:
    """The result as text for a terminal."""
    health_streams = result.get("health_streams")
    rows = {
        "steady ITL, before (ms)": "steady_itl_before_ms",
        "steady ITL, newcomers running (ms)": "steady_itl_while_prompts_run_ms",
        "newcomers' TTFT (ms)": "newcomer_ttft_ms",
        f"/health, {health_streams} streams (ms)": "health_ms",
        f"ITL, {health_streams} streams (ms)": "itl_with_health_streams_ms",
    }
    prompts = ", ".join(map(str, result["newcomer_prompt_tokens"]))
    what = "pictures" if result["pictures"] else "prompts"
    title = f"{result['model']} at {result['url']}: {result['streams']} streams; {what} of {prompts} tokens arrive"
    return f"{title}\n{table({name: result[key] for name, key in rows.items() if key in result})}"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Measure how far long prompts or pictures stall running streams.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="root of an OpenAI-compatible server")
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="model to ask for; the first served if none")
    parser.add_argument("--api-key", default=os.environ.get("API_KEY"), help="sent as a bearer token")
    parser.add_argument("--streams", type=int, default=8, help="steady streams")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens in a steady stream's prompt, about")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens in a steady stream's answer")
    parser.add_argument("--long-prompts", type=int, default=4, help="long prompts that arrive at once")
    parser.add_argument("--long-prompt-tokens", type=int, default=1200, help="tokens in a long prompt, about")
    parser.add_argument("--long-max-tokens", type=int, default=32, help="tokens in the answer to a long prompt")
    parser.add_argument("--pictures", type=int, default=0, help="questions about pictures that arrive instead")
    parser.add_argument("--picture-size", type=size, default=(4000, 3000), metavar="WIDTHxHEIGHT", help="in pixels")
    parser.add_argument("--quiet-seconds", type=float, default=2.0, help="time before the newcomers arrive, and after")
    parser.add_argument("--health-streams", type=int, default=32, help="streams while /health is asked; 0: none")
    parser.add_argument("--health-seconds", type=float, default=10.0, help="how long /health is asked")
    parser.add_argument("--health-interval", type=float, default=0.02, help="seconds between two askings")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a stream may be silent")
    parser.add_argument("--seed", type=int, default=0, help="decides the prompts")
    parser.add_argument("--json", metavar="FILE", help="file for the result; '-': JSON in place of the table")
    args = parser.parse_args(argv)
    if min(args.streams, args.long_prompts) < 1:
        parser.error("--streams and --long-prompts must be at least 1")
    return args


def size(text: str) -> tuple[int, int]:
    """Width and height in pixels. Raises ValueError for anything else."""
    width, height = map(int, text.split("x"))
    return width, height


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; 1 if the server could not be measured."""
    args = parse_args(argv)
    try:
        result = asyncio.run(run(args))
    except (TargetError, StreamError, httpx.HTTPError) as error:
        sys.stderr.write(f"stall: {str(error) or type(error).__name__}\n")
        return 1
    document = json.dumps(result, indent=2) + "\n"
    if args.json == "-":
        sys.stdout.write(document)
        return 0
    sys.stdout.write(report(result) + "\n")
    if args.json:
        Path(args.json).write_text(document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
