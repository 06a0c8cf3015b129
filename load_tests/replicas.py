"""Latency and throughput through one address or several: a proxy in front of replicas, or several servers.

    .venv/bin/python load_tests/replicas.py --url http://127.0.0.1:8000
    .venv/bin/python load_tests/replicas.py --url http://127.0.0.1:8001 --url http://127.0.0.1:8002

Latency is measured with one small request after another. Throughput is measured with simultaneous streams, which are
distributed among the addresses in turn.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit


class Client:
    """One persistent connection."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)

    def ask(self, body: Mapping[str, Any]) -> bytes:
        """The whole answer to a completion request. Raises RuntimeError if it failed."""
        headers = {"content-type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer[:200]!r}")
        return answer


def latencies_ms(url: str, requests: int) -> list[float]:
    """What each of `requests` small requests took, sorted."""
    client, taken = Client(url), []
    for number in range(requests + 20):
        began = time.perf_counter()
        client.ask({"prompt": f"{number}", "max_tokens": 1})
        if number >= 20:  # the first ones are cold
            taken.append((time.perf_counter() - began) * 1000)
    return sorted(taken)


def tokens_per_s(urls: Sequence[str], streams: int, tokens: int) -> float:
    """The tokens of `streams` streamed answers of `tokens` each, divided by the time that all took."""
    body = {"max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}

    def one(number: int) -> None:
        answer = Client(urls[number % len(urls)]).ask({**body, "prompt": f"Story number {number}"})
        if not answer.endswith(b"data: [DONE]\n\n") or b'"error"' in answer:
            raise RuntimeError(f"a stream broke: {answer[-200:]!r}")

    began = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(one, range(streams)))
    return streams * tokens / (time.perf_counter() - began)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Measure a proxy before replicas, or several servers.")
    parser.add_argument("--url", action="append", required=True, help="an address; may be given several times")
    parser.add_argument("--requests", type=int, default=400, help="small requests, one after another [400]")
    parser.add_argument("--streams", type=int, default=16, help="streams at once [16]")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a stream [256]")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of streams, of which the median counts [5]")
    given = parser.parse_args(arguments)
    taken = latencies_ms(given.url[0], given.requests)
    p99 = taken[min(len(taken) - 1, len(taken) * 99 // 100)]
    print(f"a small request: p50 {statistics.median(taken):.2f} ms, p99 {p99:.2f} ms")
    tokens_per_s(given.url, given.streams, given.tokens)
    rounds = [tokens_per_s(given.url, given.streams, given.tokens) for _ in range(given.rounds)]
    print(f"{given.streams} streams: {statistics.median(rounds):.0f} tokens/s (median of {given.rounds})")


if __name__ == "__main__":
    main()
