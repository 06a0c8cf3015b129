"""Two models behind one address: a request's model answers it, and is loaded for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from server.hosting.conftest import HostServer, StartHost

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def host(start_host: StartHost, dummy_model: Path, other_model: Path) -> HostServer:
    other = ["--hf-overrides", '{"max_position_embeddings": 1024}']
    return start_host(
        "--model", f"one={dummy_model}", "--model", f"two={other_model}", "--load-format", "dummy", *other
    )


def ask(host: HostServer, model: str | None, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **fields}
    return host.http.post(CHAT, json=body if model is None else {"model": model, **body})


def states(host: HostServer) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in host.http.get("/v1/models").json()["data"]}


def test_a_model_is_loaded_when_a_request_names_it(start_host: StartHost, dummy_model: Path, other_model: Path) -> None:
    host = start_host("--model", f"one={dummy_model}", "--model", f"two={other_model}", "--load-format", "dummy")
    assert states(host) == {"one": "unloaded", "two": "unloaded"}
    answer = ask(host, "two")
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "two"


def test_a_request_without_a_model_goes_to_the_first(host: HostServer) -> None:
    assert ask(host, None).json()["model"] == "one"


def test_a_name_that_nothing_has_is_refused_with_those_there_are(host: HostServer) -> None:
    answer = ask(host, "three")
    assert answer.status_code == 404
    assert "one, two" in answer.json()["error"]["message"]


def test_metrics_of_all_models_are_told_apart_by_their_names(host: HostServer) -> None:
    for name in ("one", "two"):
        assert ask(host, name).status_code == 200
    text = host.http.get("/metrics").text
    assert text.count("# TYPE tidewheel:num_requests_running gauge") == 1
    for name in ("one", "two"):
        assert f'tidewheel:num_requests_running{{model_name="{name}"}} 0.0' in text
