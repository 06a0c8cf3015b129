"""The perplexity that a server's model gives a text: by its own scores of the prompt, or by llama.cpp's own program.

Both score the second half of each window, so that all have the same tokens and the same contexts.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from target import Target

CONTEXT = 512
_TIMEOUT_S = 600.0
_ESTIMATE = re.compile(r"Final estimate: PPL.* = ([0-9.]+) \+/-")


class PerplexityError(Exception):
    """A server or a program that gave no perplexity."""


def of_server(target: Target, windows: Sequence[Sequence[int]]) -> float:
    """From the log-probabilities of the prompts' tokens, which vLLM's field asks for.

    Raises PerplexityError if the server does not give them.
    """
    scores: list[float] = []
    with httpx.Client(base_url=target.base_url, headers=target.headers, timeout=_TIMEOUT_S) as client:
        for window in windows:
            body = {"model": target.model, "prompt": list(window), "max_tokens": 1, "prompt_logprobs": 0}
            try:
                answer = client.post("/v1/completions", json=body).raise_for_status()
                places: list[dict[str, Any] | None] = answer.json()["choices"][0]["prompt_logprobs"]
                for token, place in list(zip(window, places, strict=True))[_first_scored(len(window)) :]:
                    assert place is not None
                    scores.append(place[str(token)]["logprob"])
            except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
                raise PerplexityError(f"no scores of prompts: {error!r}") from error
    return math.exp(-sum(scores) / len(scores))


def of_llama_perplexity(program: Path, file: str, text: Path, num_windows: int, threads: int) -> float:
    """From llama.cpp's program of that name. Raises PerplexityError if it gives none."""
    command = [program, "--model", file, "--file", text, "--ctx-size", CONTEXT, "--batch-size", CONTEXT, "--chunks",
               num_windows, "--threads", threads]  # fmt: skip
    try:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PerplexityError(str(error)) from error
    if found := _ESTIMATE.search(done.stdout + done.stderr):
        return float(found[1])
    raise PerplexityError((done.stderr.strip().splitlines() or ["it wrote nothing"])[-1])


def _first_scored(num_tokens: int) -> int:
    return num_tokens // 2 + 1
