"""`--threads-bind` with several groups: the real command answers as with one thread, to the bit."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
from server.conftest import ServerProcess

native: Any = pytest.importorskip("tidewheel._native")

PROMPTS = ["The tide turns the wheel.", "Who are you?", "One, two, three, " * 40]


def answers(threads_bind: str) -> list[Any]:
    server = ServerProcess("--quantization", "int8", "--kv-cache-dtype", "int8", "--threads-bind", threads_bind)
    try:
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
            body = {"prompt": PROMPTS, "max_tokens": 24, "temperature": 0.8, "seed": 5, "logprobs": 3, "echo": True}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert f"on CPUs {threads_bind}" in server.log
            return [(choice["text"], choice["logprobs"]) for choice in answer.json()["choices"]]
    finally:
        server.stop()


# Two servers start.
def test_groups_answer_as_one_thread_does() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("this machine has one processor")
    assert answers(f"{cpus[0]}|{cpus[1]}") == answers(str(cpus[0]))
