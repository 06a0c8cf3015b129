"""Requests of LiteLLM, LlamaIndex and other clients, without the clients: record.py has recorded them.

Each client asks for a call, goes on with its result, and asks for text, whole and as a stream, and for an object.
test_other_clients.py runs the clients themselves, for `make clients`.
"""

from __future__ import annotations

import json

import httpx
import pytest
from clients.record import RECORDED
from server.conftest import ServerProcess, events

CLIENTS = sorted(path.stem for path in RECORDED.glob("*.json"))


@pytest.mark.parametrize("client", CLIENTS)
def test_the_requests_of_other_clients_are_answered(client: str, demo_server: ServerProcess) -> None:
    pytest.importorskip("llguidance")  # not there on every machine
    requests = json.loads((RECORDED / f"{client}.json").read_text("utf-8"))
    texts, kinds = set[str](), set[str]()
    with httpx.Client(base_url=demo_server.url, timeout=60, trust_env=False) as http:
        for request in requests:
            path, body = request["path"], request["body"]
            response = http.post(path, content=json.dumps(body), headers=request["headers"])
            assert response.status_code == 200, (body, response.text)
            if path == "/api/show":
                continue
            text, calls = read_ollama(response) if path == "/api/chat" else read_chat(response, body.get("stream"))
            asked = body["messages"][-1]
            if asked["role"] == "tool":
                assert text
                kinds.add("after a call")
            elif asked["content"] == "Who are you?":
                texts.add(text[:100])
                assert "Tidewheel" in text
            elif asked["content"] == "Invent a wheel.":
                wheel = json.loads(calls[0][1] if calls else text)
                assert 3 <= wheel["spokes"] <= 9
                assert wheel["material"] in ("oak", "iron")
                kinds.add("object")
            else:
                name, arguments = calls[0]
                assert name == body["tools"][0]["function"]["name"]
                assert isinstance(json.loads(arguments)["city"], str)
                kinds.add("call")
    assert kinds == {"call", "after a call", "object"}
    assert len(texts) == 1, "whole and as a stream"


def read_chat(response: httpx.Response, stream: bool | None) -> tuple[str, list[list[str]]]:
    """The text of an answer, and the names and arguments of its calls. The last call may be cut off."""
    parts = (
        [choice["delta"] for chunk in events(response) for choice in chunk["choices"]]
        if stream
        else [response.json()["choices"][0]["message"]]
    )
    calls: dict[int, list[str]] = {}
    for part in parts:
        for index, call in enumerate(part.get("tool_calls") or ()):
            found = calls.setdefault(call.get("index", index), ["", ""])
            found[0] += call["function"].get("name") or ""
            found[1] += call["function"].get("arguments") or ""
    return "".join(part.get("content") or "" for part in parts), [*calls.values()]


def read_ollama(response: httpx.Response) -> tuple[str, list[list[str]]]:
    """The same in Ollama's protocol, where a stream has a line for each part."""
    parts = [json.loads(line)["message"] for line in response.text.splitlines()]
    calls = [call["function"] for part in parts for call in part.get("tool_calls") or ()]
    text = "".join(part.get("content") or "" for part in parts)
    return text, [[call["name"], json.dumps(call["arguments"])] for call in calls]
