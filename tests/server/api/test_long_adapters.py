"""Adapters for longer contexts over HTTP: each name has its own context, and a 400 says which."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import lora_files
import pytest
from cores import one_core
from server.conftest import RefusedStart, ServerProcess

OWN, LONG = 512, 2048
_LINEAR = '{"rope_type": "linear", "factor": 2}'


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    lora_files.write(root / "short", lora_files.tensors(1))
    for name, length in (("long", LONG), ("later", LONG), ("longer", 2 * LONG)):
        lora_files.write(root / name, lora_files.tensors(2), context_length=length)
    return root


def start(dummy_model: Path, folders: Path, *more: str) -> ServerProcess:
    return ServerProcess(
        *(str(dummy_model), "--load-format", "dummy", "--served-model-name", "base", "--enable-lora"),
        *("--long-lora-scaling-factors", "2.0,4.0", "--max-loras", "2", "--kv-cache-space", "0.05"),
        *("--threads-bind", one_core()),
        *("--lora-modules", f"short={folders / 'short'}", f"long={folders / 'long'}"),
        *("--allow-runtime-lora-updating", "--lora-resolver-cache-dir", str(folders), *more),
    )


@pytest.fixture(scope="module")
def server(dummy_model: Path, folders: Path) -> Iterator[ServerProcess]:
    process = start(dummy_model, folders)
    yield process
    process.stop()


def complete(server: ServerProcess, model: str, length: int, **fields: Any) -> httpx.Response:
    prompt = [(7 * i) % 200 + 4 for i in range(length)]
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json={"ignore_eos": True, **body}, timeout=60)


def test_each_name_has_its_own_context(server: ServerProcess) -> None:
    assert complete(server, "later", 1).status_code == 200  # is found in the folder
    cards = {card["id"]: card["max_model_len"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert cards == {"base": OWN, "short": OWN, "long": LONG, "later": LONG}


@pytest.mark.parametrize(("model", "context"), [("base", OWN), ("short", OWN), ("long", LONG)])
def test_a_prompt_must_fit_the_context_of_its_name(server: ServerProcess, model: str, context: int) -> None:
    assert complete(server, model, context - 4).status_code == 200
    response = complete(server, model, context)
    assert response.status_code == 400
    assert f"context is {context} tokens" in response.json()["error"]["message"]
    messages = [{"role": "user", "content": "tide" * (context // 4)}]
    body = {"model": model, "messages": messages, "max_tokens": 4}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400
    assert f"context is {context} tokens" in response.json()["error"]["message"]
    text = complete(server, model, 1, prompt="t" * (context - 1))
    assert text.json()["usage"]["prompt_tokens"] == context - 1
    assert text.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("model", "context"), [("base", OWN), ("long", LONG)])
def test_answers_and_shortened_prompts_end_with_the_context(server: ServerProcess, model: str, context: int) -> None:
    answer = complete(server, model, context - 40, max_tokens=5000).json()
    assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (context, "length")
    shortened = complete(server, model, LONG + 100, truncate_prompt_tokens=-1).json()
    assert shortened["usage"]["prompt_tokens"] == context - 1
    too_much = complete(server, model, 10, truncate_prompt_tokens=context + 1)
    assert too_much.status_code == 400


def test_the_same_prompt_is_another_with_a_longer_context(server: ServerProcess) -> None:
    def tokens(model: str) -> list[int]:
        found: list[int] = complete(server, model, 300, max_tokens=16).json()["choices"][0]["token_ids"]
        return found

    alone = {model: tokens(model) for model in ("base", "short", "long")}
    assert len({tuple(found) for found in alone.values()}) == 3
    assert {model: tokens(model) for model in alone} == alone  # from the prefix cache


@pytest.mark.sweep
def test_drafts_change_no_token_of_a_long_context(server: ServerProcess, dummy_model: Path, folders: Path) -> None:
    drafting = start(dummy_model, folders, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
    try:
        for model, context in (("base", OWN), ("long", LONG)):
            found, wanted = (complete(one, model, context - 60, max_tokens=100).json() for one in (drafting, server))
            assert found["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"]
            assert found["usage"]["total_tokens"] == context
    finally:
        drafting.stop()


def test_a_factor_that_was_not_given_is_refused(server: ServerProcess, folders: Path) -> None:
    body = {"lora_name": "x", "lora_path": str(folders / "longer")}
    response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "start with --long-lora-scaling-factors 8.0, not only 2.0, 4.0" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lora-modules", "a=long"], "start with --long-lora-scaling-factors 4.0"),
        (["--long-lora-scaling-factors", "4", "--max-model-len", "2049"], "this model's 512, and more than the 2048"),
        (["--long-lora-scaling-factors", "4", "--rope-scaling", _LINEAR], "this one has a rope of linear"),
    ],
)
def test_what_cannot_be_served_ends_the_start(
    refused_start: RefusedStart,
    monkeypatch: pytest.MonkeyPatch,
    dummy_model: Path,
    folders: Path,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(folders)
    given = (str(dummy_model), "--load-format", "dummy", "--kv-cache-space", "0.05", "--enable-lora")
    code, said = refused_start(*given, *arguments)
    assert code != 0
    assert words in said
    assert "Traceback" not in said
