"""A server that was started as vLLM's, with its flags: what they change can be seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_hub import fake_hub, hub_environment
from samples import swept
from server.conftest import TIDEWHEEL, RefusedStart, ServerProcess

from tidewheel import _native
from tidewheel.engine.devices.cpu.groups import choose_groups
from tidewheel.engine.machine.cgroup import cpu_quota

FLAGS = [
    *("--load-format", "dummy", "--dtype", "float", "--max_num_seqs", "4", "--swap-space", "4", "-O3"),
    *(
        "--trust-remote-code",
        "--enforce-eager",
        "--gpu-memory-utilization",
        "0.9",
        "--response-role",
        "helper",
        "--max-logprobs",
        "3",
    ),
    *("--override-generation-config", '{"temperature": 0, "max_new_tokens": 5}'),
    *("--enable-force-include-usage", "--block-size", "16"),
    *("--return-tokens-as-token-ids", "--rope-theta", "5e5", "--hf-overrides.max_position_embeddings", "256"),
]
_CORES = sum(map(len, choose_groups("auto", _native.topology(), cpu_quota())))
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("options") / "options.yaml"
    file.write_text("served-model-name: [from-the-file]\nmax_num_batched_tokens: 128\n")
    groups = ["-tp", "2"] if len(os.sched_getaffinity(0)) > 1 else []
    command = [sys.executable, "-m", "tidewheel.entrypoints.openai.api_server"]
    arguments = ("--model", str(dummy_model), *FLAGS, *groups, "--config", str(file))
    server = ServerProcess(*arguments, command=command, cwd=file.parent)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60, trust_env=False) as client:
        yield client


def chat(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/chat/completions", json={"messages": MESSAGES, "max_tokens": 3, **fields})


def test_what_has_no_effect_is_logged(server: ServerProcess) -> None:
    for flag in ("--swap-space", "--optimization-level", "--trust-remote-code", "--block-size"):
        assert server.log.count(f"{flag} has no effect: ") == 1
    for flag in ("--enforce-eager", "--gpu-memory-utilization"):  # which has its default value here
        assert server.log.count(f"{flag}: no effect on the cpu device") == 1
    if len(os.sched_getaffinity(0)) > 1:
        assert "in 2 threads" in server.log
        assert "|" in server.log.partition("on CPUs ")[2].partition("\n")[0]


def test_the_file_and_the_overrides_are_used(client: httpx.Client) -> None:
    (model,) = client.get("/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("from-the-file", 256)


def test_answers_have_the_role_and_the_defaults(client: httpx.Client) -> None:
    first, second = (chat(client, logprobs=True, top_logprobs=1).json()["choices"][0] for _ in range(2))
    assert first["message"]["role"] == "helper"
    assert first["message"] == second["message"]  # at temperature 0
    assert all(entry["token"].startswith("token_id:") for entry in first["logprobs"]["content"])
    lines = chat(client, stream=True).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events[0]["choices"][0]["delta"]["role"] == "helper"
    assert events[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "counted"),
    [("/chat/completions", "completion_tokens"), ("/completions", "completion_tokens"), ("/messages", "output_tokens")],
)
def test_no_answer_is_longer_than_the_server_allows(
    client: httpx.Client, server: ServerProcess, path: str, counted: str
) -> None:
    assert "Answers have at most 5 tokens (max_new_tokens)" in server.log
    of_messages = path == "/messages"
    said: dict[str, Any] = {"prompt": "a"} if path == "/completions" else {"messages": MESSAGES}
    for fields in [{"max_tokens": 3}, {"max_tokens": 100}] + [{}] * (not of_messages):
        answer = client.post(path, json={**said, **fields} if of_messages else {**said, **fields, "ignore_eos": True})
        assert answer.json()["usage"][counted] == min(fields.get("max_tokens", 5), 5)
        assert answer.json()["stop_reason" if of_messages else "choices"]
    if of_messages:
        assert answer.json()["stop_reason"] == "max_tokens"
        return
    answer = client.post(path, json={**said, "min_tokens": 6})
    assert answer.status_code == 400
    assert "min_tokens must be at most 5, the longest answer of this server" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 4}),
        ("/completions", {"prompt": "a", "logprobs": 4}),
        ("/completions", {"prompt": "a", "prompt_logprobs": 4}),
        ("/completions", {"prompt": "a", "logprobs": -1}),
        ("/responses", {"input": "a", "top_logprobs": 4}),
    ],
)
def test_more_logprobs_than_allowed_are_refused(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    answer = client.post(path, json=fields)
    assert answer.status_code == 400
    assert "must be at most 3 on this server (--max-logprobs)" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--node-rank", "2", "--ctx-size", "9"],
            "unknown option --ctx-size (did you mean --max-model-len?)",
        ),
        # Before a model is looked for, and this one is nowhere.
        (["none", "--tensor-parallel-size", "100000"], f"as many cores to make groups of, and there are {_CORES}:"),
        (["none", "-tp", "100000", "-pp", "2"], "--tensor-parallel-size 100000 needs as many cores"),
        (["s3://bucket/m"], "s3://bucket/m is an address, and a model is a folder"),
        (["https://huggingface.co/Qwen/Qwen3-0.6B/"], "owner/name: say Qwen/Qwen3-0.6B"),
        (["--override-generation-config", '{"top_p": 7}'], "--override-generation-config: top_p must be"),
        (
            ["--override-generation-config", '{"max_tokens": 7, "do_sampel": 1}'],
            "max_new_tokens, not do_sampel, max_tokens (did you mean max_new_tokens?)",
        ),
        (["--max-logprobs", "-2"], "--max-logprobs: must be at least -1"),
    ],
)
def test_what_cannot_be_is_told(refused_start: RefusedStart, arguments: list[str], said: str) -> None:
    code, told = refused_start(*arguments)
    assert code in (1, 2)
    assert any(line.startswith("tidewheel serve: ") for line in told.splitlines())
    assert said in told


def test_the_package_is_a_command_that_serves(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tidewheel.server", "s3://bucket/m", "--port", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("tidewheel serve: ")
    assert "s3://bucket/m is an address" in done.stderr


def test_the_command_for_batch_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tidewheel.entrypoints.openai.run_batch", "-i", "none.jsonl", "-o", "out.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("tidewheel run-batch: ")
    assert "none.jsonl" in done.stderr


@pytest.mark.parametrize("tokenizer", [["--tokenizer", "own/model"], swept([])])
def test_a_tokenizer_has_a_revision_of_its_own(dummy_model: Path, tmp_path: Path, tokenizer: list[str]) -> None:
    files = {path.name: path.read_bytes() for path in dummy_model.iterdir()}
    command = [*TIDEWHEEL, "serve", "own/model", *tokenizer, "--load-format", "dummy", "--tokenizer-revision", "v3"]
    with fake_hub({"own/model": files}) as hub:
        environment = hub_environment(hub.endpoint, tmp_path)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no revision v3" in done.stderr
