"""Models with recurrent layers behind the real server: chats, streams, prefixes that are found, preemption."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import models_zoo
import pytest
from cores import one_core
from optional_packages import require_packages
from server.conftest import RunningServer, StartServer, events

from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.options import EngineOptions

require_packages("torch", "transformers")
pytest.importorskip("tidewheel._native")

LIMITS: Any = {"dtype": "float32", "max_num_seqs": 4}
STORY = "the quick brown fox jumps over the lazy dog and then the dog sleeps, "


@pytest.fixture(scope="module", params=["qwen3_5", "falcon-h1", "mamba2"])
def hybrid(request: pytest.FixtureRequest, start_server: StartServer) -> RunningServer:
    folder = models_zoo.folder(request.param, tokenizer=True)
    options = EngineOptions(
        str(folder), device="cpu", device_options=(CpuOptions(threads_bind=one_core()),), **LIMITS, max_model_len=256
    )
    return start_server(engine=load_engine(options), served_model_names=("hybrid",))


def asked(*texts: str, **fields: Any) -> dict[str, Any]:
    """A chat whose turns are these."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    usual = {"model": "hybrid", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    return {**usual, "messages": messages, **fields}


def answer(server: RunningServer, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model's text, and the usage."""
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    made = response.json()
    return made["choices"][0]["message"]["content"], made["usage"]


def metric(server: RunningServer, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def test_a_stream_says_what_an_answer_says(hybrid: RunningServer) -> None:
    expected, _ = answer(hybrid, asked(STORY))
    chunks = events(hybrid.post("/v1/chat/completions", asked(STORY, stream=True)))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == expected


def test_the_next_turn_goes_on_from_a_snapshot(hybrid: RunningServer) -> None:
    before = metric(hybrid, "tidewheel:prefix_cache_hits_total")
    question = "please tell me the story again: " + 3 * STORY
    said, usage = answer(hybrid, asked(question))
    following = asked(question, said, "and then?")
    first, again = (answer(hybrid, following) for _ in range(2))
    prompt = usage["prompt_tokens"]
    found = [turn[1]["prompt_tokens_details"]["cached_tokens"] for turn in (first, again)]
    assert prompt - 32 < found[0] <= prompt <= first[1]["prompt_tokens"]
    assert found[1] >= found[0]
    assert again[0] == first[0]
    assert metric(hybrid, "tidewheel:prefix_cache_hits_total") - before == sum(found)


def test_preempted_sequences_say_what_they_say_alone(start_server: StartServer) -> None:
    folder = str(models_zoo.folder("falcon-h1", tokenizer=True))
    options = EngineOptions(
        folder, device="cpu", device_options=(CpuOptions(threads_bind=one_core()),), **LIMITS, max_model_len=112
    )
    engine = load_engine(replace(options, num_gpu_blocks_override=12))  # for two or three of them
    server = start_server(engine=engine, served_model_names=("hybrid",))
    bodies = [asked(text, max_tokens=60) for text in ("the fox sleeps", "a dog jumps", "over and over", "the lazy fox")]
    alone = [answer(server, body)[0] for body in bodies]
    assert metric(server, "tidewheel:num_preemptions_total") == 0
    # On a busy machine, one may end before the next one comes.
    while metric(server, "tidewheel:num_preemptions_total") == 0:
        with ThreadPoolExecutor(len(bodies)) as pool:
            together = list(pool.map(lambda body: answer(server, body)[0], bodies))
        assert together == alone
