"""Paths without `/v1`, SageMaker's `/invocations`, renders of prompts, and `/tokenizer_info`."""

from __future__ import annotations

from typing import Any

import encoder_zoo as zoo
import pytest
from server.conftest import RunningServer, StartServer

from tidewheel.engine.encoders.load import load_encoders

HELLO = [{"role": "user", "content": "SAY(hi)YAS"}]


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    encoders = load_encoders([str(zoo.folder("bert"))], ["embed"])
    return start_server(encoders=encoders, enable_tokenizer_info_endpoint=True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": HELLO}),
        ("/completions", {"prompt": "SAY(hi)YAS"}),
        ("/embeddings", {"input": "hi"}),
        ("/responses", {"input": "SAY(hi)YAS"}),
        ("/messages", {"messages": HELLO, "max_tokens": 9}),
    ],
)
def test_paths_without_v1(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    short, long = server.post(path, body), server.post(f"/v1{path}", body)
    assert short.status_code == long.status_code == 200
    assert short.json().keys() == long.json().keys()
    wrong = {**body, "temprature": 1}
    assert server.post(path, wrong).json().keys() == server.post(f"/v1{path}", wrong).json().keys()


def test_models_without_v1(server: RunningServer) -> None:
    assert server.http.get("/models").json() == server.http.get("/v1/models").json()
    assert server.http.get("/models/scripted").json()["id"] == "scripted"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": HELLO}, "chat.completion"),
        ({"prompt": "SAY(hi)YAS"}, "text_completion"),
        ({"input": "hi"}, "list"),
        ({"text_1": "a", "text_2": "b"}, "list"),
    ],
)
def test_invocations_are_told_by_the_body(server: RunningServer, body: dict[str, Any], kind: str) -> None:
    response = server.post("/invocations", body)
    assert (response.status_code, response.json()["object"]) == (200, kind)


def test_invocations_stream(server: RunningServer) -> None:
    assert "data: [DONE]" in server.post("/invocations", {"messages": HELLO, "stream": True}).text


@pytest.mark.parametrize("content", [b"[]", b"{", b"{}", b'{"model": "scripted"}', b"[" * 100_000, b"\xff"])
def test_invocations_of_no_kind_are_refused(server: RunningServer, content: bytes) -> None:
    response = server.http.post("/invocations", content=content)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("the body ")


def test_a_conversation_is_rendered(server: RunningServer) -> None:
    before = len(server.engine.requests)
    rendered = server.post("/v1/chat/completions/render", {"messages": HELLO}).json()
    assert len(server.engine.requests) == before
    assert rendered["prompt"] == "<user>SAY(hi)YAS<assistant>"
    assert bytes(rendered["token_ids"]).decode() == rendered["prompt"]
    assert rendered["model"] == "scripted"
    response = server.post("/v1/chat/completions/render", {"messages": [], "max_tokens": 0})
    assert response.json()["error"]["param"] == "messages"


def test_prompts_are_rendered(server: RunningServer) -> None:
    first, second = server.post("/v1/completions/render", {"prompt": ["a", "b"]}).json()
    assert (first["prompt"], second["prompt"]) == ("<bos>a", "<bos>b")
    assert second["token_ids"] == [256, ord("b")]
    (ids,) = server.post("/v1/completions/render", {"prompt": [97], "echo": True}).json()
    assert (ids["prompt"], ids["token_ids"]) == ("a", [97])
    assert server.post("/v1/completions/render", {"prompt": [999]}).json()["error"]["param"] == "prompt"


def test_the_tokenizer_is_shown_on_request(server: RunningServer, start_server: StartServer) -> None:
    info = server.http.get("/tokenizer_info").json()
    assert info["special_tokens"]["<eos>"] == 257
    assert info["special_tokens_map"] == {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert (info["bos_token"], info["eos_token"], "pad_token" in info) == ("<bos>", "<eos>", False)
    assert info["chat_template"].startswith("{% for message")
    answer = start_server().http.get("/tokenizer_info")
    assert answer.status_code == 404
    assert "--enable-tokenizer-info-endpoint" in answer.json()["error"]["message"]
