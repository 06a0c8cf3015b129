"""At most 100 characters of what a client sent come back to it and into the log, and quoting them costs little."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from samples import swept
from server.conftest import RunningServer, StartProcess, StartServer

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "SAY(hi)YAS"}]
LONG = "temperature" * 100
MOST = 400  # characters of an error: what it says, and 100 of the client's


def call(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


BODIES: list[tuple[str, dict[str, Any]]] = [
    *((path, {LONG: 1}) for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/tokenize", "/v1/embeddings", "/rerank")),
    (CHAT, {"messages": HELLO, "stream": True, "stream_options": {LONG: 1}}),
    (CHAT, {"messages": HELLO, "response_format": {"type": LONG}}),
    (CHAT, {"messages": HELLO, "model": LONG}),
    ("/v1/embeddings", {"input": "a", "model": LONG}),
    (CHAT, {"messages": [{"role": LONG, "content": "a"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    (CHAT, {"messages": HELLO, "reasoning_effort": LONG}),
    (CHAT, {"messages": HELLO, "verbosity": LONG}),
    (CHAT, {"messages": HELLO, "tools": [call(name=LONG)]}),
    (CHAT, {"messages": HELLO, "tools": [{"type": LONG}]}),
    (CHAT, {"messages": HELLO, "tools": [call()], "tool_choice": {"type": "function", "function": {"name": LONG}}}),
    (CHAT, {"messages": HELLO, "tools": [call()], "tool_choice": {"type": LONG}}),
    (CHAT, {"messages": HELLO, "logit_bias": {LONG: 1}}),
    (CHAT, {"messages": HELLO, "logit_bias": {str(i): 1000 for i in range(200)}}),
    (CHAT, {"messages": HELLO, "stop": [LONG, ""]}),
    (CHAT, {"messages": HELLO, "request_id": LONG}),
    (COMPLETIONS, {"prompt": "a", "truncation_side": LONG}),
    (RESPONSES, {"input": "a", "previous_response_id": LONG}),
    (RESPONSES, {"input": [{"type": "item_reference", "id": LONG}]}),
    (RESPONSES, {"input": [{"type": LONG}]}),
    (RESPONSES, {"input": "a", "include": [LONG]}),
    (RESPONSES, {"input": "a", "reasoning": {"effort": LONG}}),
    (MESSAGES, {"messages": HELLO, "max_tokens": 4, "tools": [{"type": LONG, "name": "a", "input_schema": {}}]}),
    (MESSAGES, {"messages": HELLO, "max_tokens": 4, "thinking": {"type": LONG}}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": LONG}]}], "max_tokens": 4}),
]  # fmt: skip


def check_echo(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert LONG[:110] not in response.text
    assert len(error["message"]) <= MOST
    assert len(error.get("param") or "") <= 200


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_errors_quote_little(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    check_echo(server.post(path, body))


def test_errors_quote_little_of_urls(server: RunningServer) -> None:
    kept = server.post(RESPONSES, {"input": "a"}).json()["id"]
    for method, path in (
        ("GET", f"/{LONG}"),
        ("GET", f"/v1/models/{LONG}"),
        ("POST", f"/v1/models/{LONG}"),
        ("GET", f"{RESPONSES}/{LONG}"),
        ("DELETE", f"{RESPONSES}/{LONG}"),
        ("GET", f"{RESPONSES}/{kept}?include={LONG}"),
        ("GET", f"{RESPONSES}/{kept}/input_items?order={LONG}"),
        ("GET", f"{RESPONSES}/{kept}/input_items?after={LONG}"),
        ("GET", f"{RESPONSES}/{kept}/input_items?limit={LONG}"),
        ("GET", f"{RESPONSES}/{kept}/input_items?limit={'9' * 1000}"),
    ):
        check_echo(server.http.request(method, path))


def test_templates_quote_little(start_server: StartServer) -> None:
    for template in ("{{ raise_exception('no: ' + messages[0].content) }}", "{{ messages[messages[0].content].a.b }}"):
        server = start_server(chat_template=template)
        response = server.post(CHAT, {"messages": [{"role": "user", "content": LONG}]})
        assert response.status_code == 400
        assert len(response.json()["error"]["message"]) < MOST


def test_an_id_that_is_too_long_is_no_id(server: RunningServer) -> None:
    for length, kept in ((100, True), (101, False)):
        response = server.http.get("/v1/models", headers={"x-request-id": "i" * length})
        assert (response.headers["x-request-id"] == "i" * length) == kept
        answer = server.post(COMPLETIONS, {"prompt": "SAY(a)YAS", "request_id": "i" * length})
        assert (answer.status_code == 200) == kept


@pytest.mark.sweep
def test_the_log_quotes_little(start_process: StartProcess) -> None:
    process = start_process()
    process.client.get(f"/{LONG}", headers={"x-request-id": LONG})
    process.client.post(CHAT, json={"messages": HELLO, "user": LONG, "metadata": {LONG: LONG}, "service_tier": LONG})
    process.client.get("/v1/models/last")
    deadline = time.monotonic() + 20
    while "/v1/models/last" not in process.log:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert LONG[:90] in process.log
    assert LONG[:110] not in process.log


@pytest.mark.parametrize("path", [MESSAGES, swept(CHAT), swept(RESPONSES)])
def test_conversations_have_so_many_pieces(server: RunningServer, path: str) -> None:
    """Each costs a little time on the event loop, and there could be a million of them in a body."""
    part = {"type": "input_text" if path == RESPONSES else "text", "text": ""}
    name = "input" if path == RESPONSES else "messages"
    for messages in (
        [{"role": "user", "content": "a"}] * (2**14 + 1),
        [{"role": "user", "content": [part] * 2**14}],
    ):
        response = server.post(path, {name: messages, **({"max_tokens": 4} if path == MESSAGES else {})})
        assert response.status_code == 400
        assert f"{name} may have at most 16384 messages" in response.json()["error"]["message"]
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1025)]
    refused = server.post(CHAT, {"messages": HELLO, "tools": tools}).json()["error"]
    assert (refused["param"], refused["message"]) == ("tools", "tools may have at most 1024 tools, got 1025")


def test_huge_names_and_values(server: RunningServer) -> None:
    huge = b"temperature" * (2**20)
    for body in (
        b'{"' + huge + b'": 1}',
        b'{"messages": [], "verbosity": "' + huge + b'"}',
        b'{"messages": [{"role": "' + huge + b'"}]}',
        b'{"messages": [], "model": "' + huge + b'"}',
    ):
        response = server.http.post(CHAT, content=body)
        assert response.status_code in (400, 404, 413)
        assert len(response.content) < 1000
