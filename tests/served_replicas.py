"""Replicas on Ray Serve as a client and their operator see them, behind any proxy."""

from __future__ import annotations

from typing import Any

import httpx
import psutil
from lost_replicas import REPLICA

import tidewheel

KEY = "a-key-of-the-tests"


class ReplicasClient:
    """A client of the replicas behind an address."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=120)

    def ask(self, *contents: str, max_tokens: int = 8, **kwargs: Any) -> httpx.Response:
        """An answer to a conversation, whose roles alternate."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return self.http.post("/v1/chat/completions", json=body, **kwargs)


def processes_of(starter: psutil.Process) -> list[psutil.Process]:
    """The processes of the replicas that a process has started, without those that choose among them."""
    titles = [(child, command_line(child)) for child in starter.children(recursive=True)]
    return [child for child, title in titles if "ServeReplica" in title and "chooser" not in title]


def command_line(process: psutil.Process) -> str:
    """What a process was started with; nothing for one that has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def check_answers_are_those_of_one_server(replicas: ReplicasClient) -> None:
    response = replicas.ask("Who are you?", headers={"x-request-id": "mine"})
    assert response.status_code == 200, response.text
    assert response.headers.get_list("x-request-id") == ["mine"]
    params = tidewheel.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with tidewheel.LLM(kv_cache_space=0.1) as direct:
        expected = direct.chat([{"role": "user", "content": "Who are you?"}], params)[0].outputs[0].text
    assert response.json()["choices"][0]["message"]["content"] == expected
    for path in ("/health", "/v1/models", "/metrics", "/openapi.json", "/", "/version"):
        assert replicas.http.get(path).status_code == 200, path


def check_keys_and_limits(replicas: ReplicasClient) -> None:
    refused = replicas.ask("Hello", headers={"authorization": "Bearer another"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert replicas.http.post("/v1/chat/completions", json={"messages": [], "n": 1000}).status_code == 400
    assert replicas.http.post("/v1/chat/completions", content=b'{"x": "' + b"y" * (17 << 20)).status_code in (413, 415)


def check_streams_are_not_buffered(replicas: ReplicasClient) -> None:
    body = {"prompt": "One", "max_tokens": 400, "stream": True, "ignore_eos": True}

    def pieces() -> int:
        with replicas.http.stream("POST", "/v1/completions", json=body) as response:
            return sum(1 for _ in response.iter_raw())

    # A piece for each token, or for the few that were ready together. Where this process waits for a core, many are: so
    # one stream of several is enough. A proxy that buffers never gives as many.
    assert any(pieces() > 40 for _ in range(20))


def check_conversations_stay_where_their_prefixes_lie(replicas: ReplicasClient) -> None:
    seen: set[str] = set()
    for i in range(64):  # new ones go to one or the other by chance
        if i >= 8 and len(seen) == 2:
            break
        question = f"Conversation number {i} begins here"
        first = replicas.ask(question)
        answer = first.json()["choices"][0]["message"]["content"]
        for more in ("And now?", "And then?"):
            later = replicas.ask(question, answer, more)
            assert later.headers[REPLICA] == first.headers[REPLICA]
        seen.add(first.headers[REPLICA])
    assert len(seen) == 2


def check_any_session_is_answered(replicas: ReplicasClient, session: bytes) -> None:
    hostile: Any = {"x-session-id": session, "x-request-id": b"\xe9", "serve_multiplexed_model_id": b"\xff"}
    response = replicas.ask("Hello", headers=hostile)
    assert response.status_code == 200, response.text
    assert len(response.headers.get_list("x-request-id")) == 1
