"""Servers get the same requests from clients in a closed loop, and are compared. The servers here are stubs."""

from __future__ import annotations

import json
import random
import shlex
import sys
from pathlib import Path

import closed_loop
import pytest
import streams
import tiny_gguf
from closed_loop import Lengths, figures
from load_tests.stub import StubServer
from measure import StreamError, StreamTimer
from peer_runners.job import Job, Scenario
from servers import SERVERS
from target import discover

STUB = Path(__file__).with_name("stub_server.py")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.write(tmp_path / "model.gguf")


def program(path: Path, command: str = f"{shlex.quote(sys.executable)} {shlex.quote(str(STUB))}") -> str:
    """A server's program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_servers_are_compared(
    model: Path, stub: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path / "llama/llama-perplexity", "echo 'Final estimate: PPL = 12.5000 +/- 0.2' #")
    (tmp_path / "text.txt").write_text("The dog sleeps, and the quick brown fox jumps over it.\n" * 200)
    arguments = [
        *("--file", str(model), "--text", str(tmp_path / "text.txt"), "--json", str(tmp_path / "result.json")),
        *("--tidewheel", program(tmp_path / "own/tidewheel"), "--cpus", "0", "--clients", "1,3"),
        *("--llama-server", program(tmp_path / "llama/llama-server"), "--least-requests", "2"),
        *("--vllm-cpu", "vllm", "--vllm-cpp", program(tmp_path / "vllm", f"{sys.executable} {STUB} --refuse now")),
        *("--prompts", "9,1,20", "--answers", "5,1,9", "--requests-per-client", "2", "--url", f"other={stub.url}"),
    ]
    assert closed_loop.main(arguments) == 0
    own, llama, vllm_cpu, vllm_cpp, other = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert own["perplexity"] == pytest.approx(13, abs=0.01)
    assert llama["perplexity"] == 12.5
    assert [(f["clients"], f["requests"]) for f in own["figures"]] == [(1, 2), (3, 6)]
    for mine, theirs in zip(own["figures"], llama["figures"], strict=True):
        assert mine["tokens"] == theirs["tokens"] > 0
        assert mine["prompt_tokens"] == theirs["prompt_tokens"]
        assert mine["in_time"] == 1
    assert [f["tokens"] for f in other["figures"]] == [f["tokens"] for f in own["figures"]]
    assert vllm_cpu["failures"] == ["it needs a --folder"]
    assert vllm_cpp["failures"] == ["no such model"]
    assert "vllm-cpp: no such model\n" in capsys.readouterr().out


def test_figures_are_of_all_answers() -> None:
    def answered(started: float, *arrivals: float) -> StreamTimer:
        return StreamTimer(started, [*arrivals], prompt_tokens=7, reported_tokens=len(arrivals), done=True)

    soon, late, slow = answered(0, 0.5, 0.6), answered(0, 2, 2.01, 2.02), answered(1, 1.5, 2.5)
    summed = figures(2, [soon, late, slow])
    assert (summed.requests, summed.prompt_tokens, summed.tokens) == (3, 21, 7)
    assert summed.tokens_per_s == pytest.approx(7 / 2.5)
    assert (summed.ttft_p50, summed.ttft_p99) == pytest.approx((500, 2000))
    assert (summed.itl_p50, summed.itl_p99) == pytest.approx((10, 1000), rel=1e-6)
    assert summed.in_time == pytest.approx(1 / 3)
    assert summed.goodput == pytest.approx(1 / 2.5)


def test_lengths_are_drawn_by_a_seed_and_cut() -> None:
    lengths = Lengths(100, 0.8, 300)
    drawn = [[lengths.draw(rng) for _ in range(2000)] for rng in (random.Random(3), random.Random(3))]
    assert drawn[0] == drawn[1]
    assert max(drawn[0]) == 300
    assert sorted(drawn[0])[1000] == pytest.approx(100, rel=0.1)


def test_every_request_is_answered_or_the_failure_is_told(stub: StubServer) -> None:
    target = discover(stub.url)
    bodies = [target.completion(f"say {i}", 4 + i) for i in range(5)]
    timers = streams.closed_loop(stub.url, bodies, 2)
    assert [timer.tokens for timer in timers] == [4, 5, 6, 7, 8]
    with pytest.raises(StreamError, match="no such model"):
        streams.closed_loop(stub.url, [bodies[0] | {"model": "refused"}], 1)


@pytest.mark.parametrize("name", SERVERS)
def test_servers_have_room_for_all_clients(name: str) -> None:
    scenarios = [Scenario("closed loop", 32, 1000, 500)]
    given = Job("folder", 99, "bfloat16", "", "file.gguf" if name != "vllm-cpu" else None, 3, [2, 3], 0, scenarios)
    command = SERVERS[name].command(Path("program"), given, 8123)
    room = {
        "tidewheel": "--max-num-seqs 32 --max-model-len 1501",
        "llama-server": "--parallel 32 --ctx-size 48128 --threads 2",
        "ik-llama-cpp": "--parallel 32 --ctx-size 48128 --threads 2",
        "vllm-cpu": "--max-num-seqs 32 --max-model-len 1501",
        "vllm-cpp": "--max-num-seqs 32 --max-model-len 1501 --block-size 32 --num-blocks 1505",
    }
    assert room[name] in " ".join(command)
    assert "--port 8123" in " ".join(command)


def test_vllm_cpp_computes_on_the_given_processors() -> None:
    given = Job("folder", 99, "bfloat16", "", None, 3, [2, 3], 0, [Scenario("closed loop", 32, 1000, 500)])
    assert SERVERS["vllm-cpp"].environment(given) == {"VLLM_CPP_CPU_THREADS": "2"}
