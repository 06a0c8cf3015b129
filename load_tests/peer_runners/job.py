"""What the runners share: the job that peers.py hands in, and the lines of JSON that it reads.

A runner is a script for the interpreter of its peer's own environment, so this needs only the standard
library. It gets one job on standard input and writes a line when it is ready, and one for each scenario.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

Arrivals = list[tuple[float, int]]  # when, in seconds of time.perf_counter(), and how many tokens

DTYPES = ("float32", "bfloat16", "float16")  # names of formats; others are methods of quantization or GGUF types

STEP_TOKENS = 2048  # the maximum in one step of a peer that computes several prompts together

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Scenario:
    """`new_tokens` are decoded after each of `prompts` prompts of `prompt_tokens` random tokens.

    `adapters`: how many of the job's LoRA adapters the prompts use in turn; 0: the model itself answers them.
    """

    name: str
    prompts: int
    prompt_tokens: int
    new_tokens: int
    adapters: int = 0


@dataclass(frozen=True)
class Job:
    """`weights` is the peer's name of the format, `file` the GGUF file with it, for peers that read one.

    `options` are further options of Tidewheel's command line. `cache_gib` is the size of the KV cache, for peers that
    need it. `adapters` are folders of LoRA adapters, of at most this `rank`.
    """

    model: str
    vocab_size: int
    weights: str
    options: str
    file: str | None
    cache_gib: int
    cpus: list[int]
    seed: int
    scenarios: list[Scenario]
    adapters: list[str] = field(default_factory=list)
    rank: int = 0

    @property
    def longest(self) -> int:
        """The longest sequence, in tokens."""
        return max(scenario.prompt_tokens + scenario.new_tokens for scenario in self.scenarios)

    @property
    def max_sequences(self) -> int:
        """The maximum number of sequences at a time."""
        return max(scenario.prompts for scenario in self.scenarios)

    def prompts(self, scenario: Scenario) -> list[list[int]]:
        """The scenario's prompts: the same token ids for every peer, no two alike."""
        choose = random.Random(f"{self.seed} {scenario.name}")
        return [
            [choose.randrange(self.vocab_size) for _ in range(scenario.prompt_tokens)] for _ in range(scenario.prompts)
        ]


class Peer(Protocol):
    """A loaded model."""

    version: str

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[Arrivals]:
        """Decode greedily exactly `new_tokens` after each prompt, all together: when each sequence's tokens came."""
        ...


class AdaptedPeer(Peer, Protocol):
    """A model that was loaded with the job's LoRA adapters."""

    def generate_adapted(self, prompts: list[list[int]], new_tokens: int, adapters: list[int]) -> list[Arrivals]:
        """The same, each prompt with one of the adapters, by index in the job's list."""
        ...


def begin() -> tuple[dict[str, Any], Callable[..., None]]:
    """The job, which is a line of standard input, and what writes a line of JSON for the driver.

    Call this once, before all else.
    """
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not for the driver

    def say(**values: Any) -> None:
        print(json.dumps(values), file=lines, flush=True)

    return json.loads(sys.stdin.readline()), say


def run(load: Callable[[Job], Peer]) -> None:
    """Run the job from standard input. `load` imports its peer's library, which may count its processors then."""
    given, say = begin()
    job = Job(**{**given, "scenarios": [Scenario(**scenario) for scenario in given["scenarios"]]})
    os.sched_setaffinity(0, job.cpus)
    peer = load(job)
    say(ready=True, version=peer.version)
    for scenario in job.scenarios:
        try:
            generate = _generator(peer, scenario)
            generate([ids[-_WARM_UP_TOKENS:] for ids in job.prompts(scenario)], 2)
            prompts = job.prompts(scenario)
            started = time.perf_counter()
            arrivals = generate(prompts, scenario.new_tokens)
            say(scenario=scenario.name, started=started, arrivals=arrivals)
        except Exception as error:  # the other scenarios may still go well
            say(scenario=scenario.name, error=f"{type(error).__name__}: {error}")
    sys.stdin.read()  # ends when the driver has seen how much memory this takes
    os._exit(0)  # the peer's own threads and processes are not waited for: the driver ends them


def _generator(peer: Peer, scenario: Scenario) -> Callable[[list[list[int]], int], list[Arrivals]]:
    if not scenario.adapters:
        return peer.generate
    adapters = [i % scenario.adapters for i in range(scenario.prompts)]
    return lambda prompts, new_tokens: cast("AdaptedPeer", peer).generate_adapted(prompts, new_tokens, adapters)
