"""How tokens are chosen where neither a request nor the model says it, by the API."""

from __future__ import annotations

from typing import Any

import pytest
from server.conftest import RunningServer, StartServer

from tidewheel.server.commands.chat.client import ChatClient

CHAT = (0.8, 40, 0.95, 0.05)
OPENAI = (1.0, 0, 1.0, 0.0)
MODELS = (0.5, 0, 1.0, 0.0)  # what the scripted model suggests
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "SAY(hi)YAS"}]}


def sampled(server: RunningServer) -> tuple[float, int, float, float]:
    sampling = server.engine.requests[-1].sampling
    return sampling.temperature, max(sampling.top_k, 0), sampling.top_p, sampling.min_p


@pytest.mark.parametrize(
    ("options", "openai", "chats"),
    [
        ({}, MODELS, MODELS),
        ({"default_sampling": "chat"}, MODELS, MODELS),
        ({"generation_config": "vllm"}, OPENAI, CHAT),
        ({"generation_config": "vllm", "default_sampling": "openai"}, OPENAI, OPENAI),
        ({"generation_config": "vllm", "default_sampling": "chat"}, CHAT, CHAT),
        (
            {"generation_config": "vllm", "override_generation_config": {"top_p": 0.5}},
            (1.0, 0, 0.5, 0.0),
            (1.0, 0, 0.5, 0.0),
        ),
        ({"generation_config": "vllm", "override_generation_config": {"max_new_tokens": 9}}, OPENAI, CHAT),
    ],
)
def test_each_api_has_its_defaults(
    start_server: StartServer, options: dict[str, Any], openai: tuple[float, ...], chats: tuple[float, ...]
) -> None:
    server = start_server(**options)
    for path, body in (
        ("/v1/chat/completions", HI),
        ("/v1/completions", {"prompt": "SAY(hi)YAS"}),
        ("/v1/messages", {**HI, "max_tokens": 5}),
        ("/v1/responses", {"input": "SAY(hi)YAS"}),
    ):
        assert server.post(path, body).status_code == 200
        assert sampled(server) == openai, path
    for path, body in (
        ("/api/chat", HI),
        ("/api/generate", {"prompt": "SAY(hi)YAS"}),
        ("/api/generate", {"prompt": "SAY(hi)YAS", "raw": True}),
    ):
        assert server.post(path, {**body, "stream": False}).status_code == 200
        assert sampled(server) == chats, path
    client = ChatClient(f"http://127.0.0.1:{server.port}", model=None, system=None, api_key=None)
    assert "".join(client.ask("SAY(hi)YAS")) == "hi"
    assert sampled(server) == chats


def test_what_a_request_says_goes_first(start_server: StartServer) -> None:
    server = start_server(generation_config="vllm")
    body = {**HI, "options": {"temperature": 0.2, "top_k": 3}, "stream": False}
    assert server.post("/api/chat", body).status_code == 200
    assert sampled(server) == (0.2, 3, 0.95, 0.05)
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["chat_sampling"] == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert "min_p 0.05" in server.post("/api/show", {}).json()["parameters"]


def test_a_client_asks_servers_that_list_no_models(start_server: StartServer) -> None:
    server = start_server(generation_config="vllm")
    client = ChatClient(f"http://127.0.0.1:{server.port}/v1", model="scripted", system=None, api_key=None)
    client.models = dict  # type: ignore[method-assign]
    assert "".join(client.ask("SAY(hi)YAS")) == "hi"
    assert sampled(server) == OPENAI
