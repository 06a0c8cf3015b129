"""The runner of peers that are servers: it starts one and streams completions for the job on its standard input."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from peer_runners import job
from servers import SERVERS, running
from streams import closed_loop
from target import Target, discover

_START_TIMEOUT_S = 600.0


class OverHttp:
    """A server with as many clients as a scenario has prompts.

    Not all take token ids. So a prompt is a text of as many tokens, and its words are chosen by the ids.
    """

    def __init__(self, name: str, program: Path, given: job.Job) -> None:
        self._until_exit = ExitStack()  # the driver ends both of them
        url = self._until_exit.enter_context(running(SERVERS[name], program, given, _START_TIMEOUT_S))
        self.version = _version(url)
        self._target: Target = discover(url)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[job.Arrivals]:
        """Decode greedily exactly `new_tokens` after each prompt: when each sequence's tokens came."""
        bodies = [self._body(ids, new_tokens) for ids in prompts]
        timers = closed_loop(self._target.base_url, bodies, len(bodies))
        return [_arrivals(timer.arrivals, new_tokens) for timer in timers]

    def _body(self, ids: list[int], new_tokens: int) -> dict[str, Any]:
        prompt = self._target.prompt(len(ids), random.Random(str(ids)))
        return self._target.completion(prompt, new_tokens, ignore_eos=True)


def _version(url: str) -> str:
    """What the server says of its build, in llama.cpp's place or vLLM's; a dash if nothing."""
    for path, field in (("/version", "version"), ("/props", "build_info")):
        answer = httpx.get(url + path)
        if answer.status_code == httpx.codes.OK and (version := answer.json().get(field)):
            return str(version)
    return "-"


def _arrivals(texts: list[float], new_tokens: int) -> job.Arrivals:
    """Tokens whose text is not certain yet come with a later one: they are counted as spread evenly over the texts."""
    counts = [round(i * new_tokens / len(texts)) for i in range(len(texts) + 1)]
    return [(when, after - before) for when, (before, after) in zip(texts, pairwise(counts), strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", choices=SERVERS)
    parser.add_argument("program", type=Path)
    args = parser.parse_args(arguments)
    job.run(partial(OverHttp, args.server, args.program))


if __name__ == "__main__":
    main()
