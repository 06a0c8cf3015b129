"""Streams and clients: framing on the wire, clients that leave, clients that do not read."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, StartServer
from server.raw_http import post_raw
from server.waiting import eventually, is_idle


@pytest.fixture(scope="module")
def slow(start_server: StartServer) -> RunningServer:
    """Each token takes a while, and nothing else may keep the engine busy."""
    return start_server(engine={"step_s": 0.01})


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("prompt", ["LOOP(", ["LOOP(", "and LOOP("]])
def test_a_client_that_hangs_up_is_aborted(slow: RunningServer, streamed: bool, prompt: str | list[str]) -> None:
    connection = post_raw(slow, {"prompt": prompt, "max_tokens": 8000, "stream": streamed, "n": 2})
    eventually(lambda: slow.engine.stats().num_running > 0, "the request never ran")
    if streamed:
        assert connection.recv(12) == b"HTTP/1.1 200"
    connection.close()
    eventually(lambda: is_idle(slow), "the engine works on for a client that has gone")


def test_a_client_that_hangs_up_in_its_body_is_no_failure(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n"
    )
    connection.sendall(head + b'{"prompt"')
    assert server.http.get("/health").status_code == 200
    connection.close()
    assert server.post("/v1/completions", {"prompt": "SAY(hi)YAS"}).status_code == 200
    time.sleep(0.1)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_leaves_after_an_event_is_aborted(slow: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "LOOP("}], "stream": True}
    with slow.http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    eventually(lambda: is_idle(slow), "the engine works on for a client that has gone")


def test_tokens_are_sent_as_they_come(slow: RunningServer) -> None:
    with slow.http.stream("POST", "/v1/completions", json={"prompt": "LOOP(", "max_tokens": 50, "stream": True}) as r:
        arrivals = [time.monotonic() for line in r.iter_lines() if line.startswith("data: {")]
    # A server that is kept from its processor joins the tokens that have come meanwhile.
    assert 5 < len(arrivals) <= 50
    assert arrivals[-1] > arrivals[0]


def test_a_client_that_does_not_read_holds_up_nobody(server: RunningServer) -> None:
    # Its answer is larger than what the sockets can hold, so that the server has to wait for it.
    body = {"prompt": ["LOOP(", "and LOOP("], "n": 4, "max_tokens": 1500, "stream": True, "logprobs": 20}
    stuck = post_raw(server, body)
    try:
        eventually(lambda: is_idle(server) and server.engine.stats().generation_tokens_total > 1000, "it never ran")
        assert server.post("/v1/completions", {"prompt": "SAY(hi)YAS"}).json()["choices"][0]["text"] == "hi"
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += stuck.recv(2**20)
    finally:
        stuck.close()
    assert received.count(b'"finish_reason":"length"') == 8
    assert len(received) > 5 * 2**20
    assert b"data: [DONE]" in received


# More than the sockets hold, eight times.
SAID = "plain and simple, schön und gut, 简单明了 🌊 " * 60


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/completions", {"prompt": f"SAY({SAID})YAS", "n": 8}, id="completions"),
        pytest.param(
            "/v1/completions",
            {"prompt": [f"{name} SAY({SAID})YAS" for name in "ab"], "n": 4},
            marks=pytest.mark.sweep,
            id="prompts",
        ),
        pytest.param(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": f"SAY({SAID})YAS"}], "n": 8},
            marks=pytest.mark.sweep,
            id="chat",
        ),
    ],
)
def test_a_client_that_pauses_misses_nothing(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    usage = {"stream_options": {"include_usage": True}}
    slow = post_raw(server, {**body, **usage, "max_tokens": 4000, "stream": True}, path)
    before = server.engine.stats().generation_tokens_total
    eventually(lambda: server.engine.stats().generation_tokens_total > before + 16000, "it never ran")
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += slow.recv(2**20)
        time.sleep(0.001)
    slow.close()
    texts = [""] * 8
    frames = [line for line in received.decode().split("\n") if line.startswith("data: {")]
    for frame in frames:
        event = json.loads(frame.removeprefix("data: "))
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    assert texts == [SAID] * 8
    assert event["usage"]["completion_tokens"] == 8 * (len(SAID.encode()) + 1)


def test_the_wire_format(server: RunningServer) -> None:
    connection = post_raw(server, {"prompt": "SAY(a\n\nb)YAS", "stream": True})
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(65536)
    connection.close()
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream" in head.lower()
    assert b"transfer-encoding: chunked" in head.lower()
    content = b""
    while not body.startswith(b"0\r\n"):
        size, _, body = body.partition(b"\r\n")
        content, body = content + body[: int(size, 16)], body[int(size, 16) + 2 :]
    *frames, end = content.decode().removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    assert all(frame.startswith("data: {") and "\n" not in frame for frame in frames)
    texts = [json.loads(frame.removeprefix("data: "))["choices"][0]["text"] for frame in frames]
    assert "".join(texts) == "a\n\nb"


def test_many_clients_at_once_get_their_own_answers(server: RunningServer) -> None:
    import asyncio

    async def ask(client: httpx.AsyncClient, i: int) -> tuple[int, str]:
        body = {"messages": [{"role": "user", "content": f"SAY(answer {i})YAS"}]}
        response = await client.post("/v1/chat/completions", json=body)
        return i, response.json()["choices"][0]["message"]["content"]

    async def all_of_them() -> list[tuple[int, str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(40)))

    assert asyncio.run(all_of_them()) == [(i, f"answer {i}") for i in range(40)]


def test_pipelined_requests_on_one_connection(server: RunningServer) -> None:
    connection = post_raw(server, {"prompt": "SAY(first)YAS"})
    data = json.dumps({"prompt": "SAY(second)YAS"}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    received = b""
    while piece := connection.recv(65536):
        received += piece
    connection.close()
    assert received.index(b'"first"') < received.index(b'"second"')
