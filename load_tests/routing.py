"""How often replicas behind a router find a conversation's prefix in their caches, and how evenly they are used.

    .venv/bin/python load_tests/routing.py --url http://127.0.0.1:8000
    .venv/bin/python load_tests/routing.py --url http://127.0.0.1:8000 \\
        --server http://127.0.0.1:8001 --server http://127.0.0.1:8002

Plays a mix of conversations, the same each time: each turn is sent with all earlier messages and answers. A hit is a
prompt token that the answer's `usage` counts as cached. The work of each replica is read from the servers' metrics, or
from the address itself if it is a proxy of Ray Serve. The caches should be empty at the start, so restart the servers.
`--record` writes all requests to a file, which `routing_simulation.py --recorded` plays without servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from conversations import ANSWER_TOKENS, Conversation, Mix, make_mix
from target import normalize_url

_TIMEOUT_S = 120.0
_SAMPLE = re.compile(r"^\w+:(prompt_tokens_total|request_success_total)\{([^}]*)\} (\S+)$", re.MULTILINE)
_REPLICA = re.compile(r'replica="([^"]*)"')


class RoutingError(Exception):
    """Servers that cannot be measured."""


@dataclass(frozen=True)
class Request:
    """An answered request."""

    conversation: Conversation
    body: dict[str, Any]
    prompt_tokens: int
    answer: str


@dataclass
class Played:
    """The results of a mix. `requests` are in the order in which they were due; None is one without an answer."""

    cached_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    requests: list[Request | None] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def answered(self) -> list[Request]:
        """The requests with an answer."""
        return [request for request in self.requests if request is not None]


async def play(url: str, mix: Mix, concurrency: int) -> Played:
    """Send all turns in order, `concurrency` at a time, but each only after the turn that it follows was answered.

    After an error, the rest of the conversation is skipped.
    """
    played = Played(requests=[None] * len(mix.order))
    answers: list[list[str]] = [[] for _ in mix.conversations]
    ended = [asyncio.Event() for _ in mix.order]
    turns = iter(enumerate(mix.order))
    before: dict[int, int] = {}  # the last turn of each conversation that was started

    async def work(client: httpx.AsyncClient) -> None:
        for number, which in turns:
            previous, before[which] = before.get(which), number
            if previous is not None:
                await ended[previous].wait()
            if previous is None or played.requests[previous] is not None:
                conversation = mix.conversations[which]
                body = conversation.body(answers[which])
                try:
                    answer = await _ask(client, conversation, body)
                    usage = answer["usage"]
                    text = answer["choices"][0]["message"]["content"] or ""
                    played.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
                    played.requests[number] = Request(conversation, body, usage["prompt_tokens"], text)
                    answers[which].append(text)
                except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
                    played.errors[f"{type(error).__name__}: {error}"] += 1
            ended[number].set()

    began = time.perf_counter()
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=_TIMEOUT_S, trust_env=False) as client:
        await asyncio.gather(*(work(client) for _ in range(concurrency)))
    played.seconds = time.perf_counter() - began
    return played


async def _ask(client: httpx.AsyncClient, conversation: Conversation, body: dict[str, Any]) -> Any:
    answer = await client.post("/v1/chat/completions", json=body, headers=conversation.headers)
    if answer.is_error:
        raise ValueError(f"{answer.status_code}: {answer.text[:200]}")
    return answer.json()


@dataclass(frozen=True)
class Done:
    """The work of each replica so far, by its name."""

    requests: Counter[str]
    prompt_tokens: Counter[str]

    def since(self, before: Done) -> Done:
        """The work since then; replicas without any are included."""
        now = (self.requests, self.prompt_tokens)
        then = (before.requests, before.prompt_tokens)
        return Done(*(Counter({name: a[name] - b[name] for name in a}) for a, b in zip(now, then, strict=True)))


def read_done(servers: Sequence[str]) -> Done:
    """Read it from the metrics of all servers. Raises RoutingError if a server has none."""
    done = Done(Counter(), Counter())
    for server in servers:
        try:
            text = httpx.get(f"{server}/metrics", timeout=_TIMEOUT_S, trust_env=False).raise_for_status().text
        except httpx.HTTPError as error:
            raise RoutingError(f"{error}; name the servers behind {server} with --server") from error
        samples = _SAMPLE.findall(text)
        if not samples:
            raise RoutingError(f"{server}/metrics does not say what was done: it is none of Tidewheel's")
        for name, labels, value in samples:
            replica = _REPLICA.search(labels)
            counts = done.requests if name.startswith("request") else done.prompt_tokens
            counts[server if replica is None else f"{server} {replica[1]}"] += int(float(value))
    return done


def largest_by_mean(counts: Counter[str]) -> float:
    """The largest replica's part, relative to the mean of all; 1 is even."""
    return max(counts.values()) * len(counts) / max(1, counts.total())


def report(played: Played, done: Done) -> str:
    """The figures as a table of one row."""
    prompt_tokens = sum(request.prompt_tokens for request in played.answered)
    columns = {
        "replicas": f"{len(done.requests)}",
        "requests": f"{len(played.answered)}",
        "prompt tokens": f"{prompt_tokens}",
        "cached": f"{played.cached_tokens / max(1, prompt_tokens):.1%}",
        "most requests / mean": f"{largest_by_mean(done.requests):.2f}",
        "most tokens / mean": f"{largest_by_mean(done.prompt_tokens):.2f}",
        "errors": f"{played.errors.total()}",
        "seconds": f"{played.seconds:.1f}",
    }
    return "  ".join(columns) + "\n" + "  ".join(text.rjust(len(name)) for name, text in columns.items())


def record(server: str, played: Played, file: Path) -> None:
    """Write the answered requests, one per line, each with the tokens of its prompt and its answer."""
    with httpx.Client(base_url=server, timeout=_TIMEOUT_S, trust_env=False) as client, file.open("w") as lines:
        for request in played.answered:
            messages = [*request.body["messages"], {"role": "assistant", "content": request.answer}]
            asked = {"messages": messages, "add_generation_prompt": False}
            tokens = client.post("/tokenize", json=asked).raise_for_status().json()["tokens"]
            line = {
                "headers": request.conversation.headers,
                "body": request.body,
                "prompt_tokens": request.prompt_tokens,
                "token_ids": tokens[: request.prompt_tokens + ANSWER_TOKENS - 1],  # the last one is not computed
            }
            lines.write(json.dumps(line) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 1 if a request failed, or nothing could be measured."""
    parser = argparse.ArgumentParser(description="Measure the router before replicas.")
    parser.add_argument("--url", required=True, help="address of the router")
    parser.add_argument(
        "--server", action="append", help="address of a server behind it; not needed for replicas on Ray Serve"
    )
    parser.add_argument("--conversations", type=int, default=200, help="how many conversations [200]")
    parser.add_argument("--concurrency", type=int, default=8, help="most requests at a time [8]")
    parser.add_argument("--seed", type=int, default=0, help="of what is random [0]")
    parser.add_argument("--record", type=Path, help="file for the requests")
    given = parser.parse_args(arguments)
    url = normalize_url(given.url)
    servers = [normalize_url(server) for server in given.server or [url]]
    try:
        before = read_done(servers)
        played = asyncio.run(play(url, make_mix(given.conversations, given.seed), given.concurrency))
        print(report(played, read_done(servers).since(before)))
        if given.record is not None:
            record(servers[0], played, given.record)
    except (RoutingError, httpx.HTTPError) as error:
        print(error, file=sys.stderr)
        return 1
    for error_text, count in played.errors.most_common():
        print(f"{count} times: {error_text}", file=sys.stderr)
    return 1 if played.errors else 0


if __name__ == "__main__":
    sys.exit(main())
