"""KV blocks on disk behind the real server: a conversation goes on after a restart, and after a kill."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cores import one_core
from server.conftest import ServerProcess
from server.waiting import eventually

pytest.importorskip("tidewheel._native")

STORY = "Tell me about the sea. " * 24


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], ServerProcess]]:
    """Starts a server of the built-in model that keeps its blocks in a folder."""
    servers: list[ServerProcess] = []

    def started() -> ServerProcess:
        servers.append(
            ServerProcess("--device", "cpu", "--threads-bind", one_core(), "--kv-offload", str(tmp_path / "kv"))
        )
        return servers[-1]

    yield started
    for server in servers:
        server.stop()


def chat(server: ServerProcess, *texts: str) -> tuple[dict[str, Any], int]:
    """A choice with log-probabilities, and how many tokens of the prompt were cached."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, "logprobs": True, "top_logprobs": 3}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    made = response.json()
    return made["choices"][0], made["usage"]["prompt_tokens_details"]["cached_tokens"]


def metrics(server: ServerProcess) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    values = (line.rpartition(" ") for line in lines if line.startswith("tidewheel:"))
    return {name.partition("{")[0].removeprefix("tidewheel:"): float(value) for name, _, value in values}


def check_found(server: ServerProcess, story: str, expected: dict[str, Any]) -> None:
    """A server that has just started answers as the one before it, from blocks that this has written."""
    answer, cached = chat(server, story)
    assert answer == expected
    assert cached >= 128
    _, cached = chat(server, story, expected["message"]["content"], "And the tide?")
    assert cached >= 128
    measured = metrics(server)
    assert measured["external_prefix_cache_hits_total"] >= 128
    assert measured["external_prefix_cache_queries_total"] >= measured["external_prefix_cache_hits_total"]
    assert measured["kv_offload_blocks_read_total"] * 16 == measured["external_prefix_cache_hits_total"]
    assert measured["kv_offload_blocks_bad_total"] == measured["kv_offload_blocks_dropped_total"] == 0
    assert (0 < measured["kv_offload_usage_perc"] < 1, measured["kv_offload_on"]) == (True, 1)
    assert measured["kv_offload_total_bytes_total"] > 0


# Three servers start, one after the other.
def test_conversations_go_on_after_a_restart_and_a_kill_until_a_reset(
    start: Callable[[], ServerProcess], tmp_path: Path
) -> None:
    first = start()
    expected, cached = chat(first, STORY)
    assert cached == 0
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(60) == 0
    second = start()
    check_found(second, STORY, expected)
    other = STORY.replace("sea", "mill")
    expected, _ = chat(second, other)
    eventually(lambda: metrics(second)["kv_offload_blocks_written_total"] > 8, "blocks should be written")
    second.process.send_signal(signal.SIGKILL)
    assert second.process.wait(60) == -signal.SIGKILL
    third = start()
    check_found(third, other, expected)
    assert any((tmp_path / "kv").glob("*/*.kv"))
    assert httpx.post(f"{third.url}/reset_prefix_cache", trust_env=False).status_code == 200
    eventually(lambda: not any((tmp_path / "kv").glob("*/*.kv")), "files should be deleted")
    assert chat(third, STORY)[1] == 0
