"""How large answers may become is known before they are begun; large ones are made and sent in parts."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
from samples import swept
from server.conftest import RunningServer, StartProcess, StartServer, events
from server.processes import memory
from server.raw_http import post_raw, read_all

from tidewheel.server.http.limits import AdmissionLimits

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
LOOP: Any = {"messages": [{"role": "user", "content": "LOOP("}]}
LIKELY_TOKEN = 96  # bytes, as they are estimated


def prompts(count: int, length: int) -> list[list[int]]:
    return [[97 + i % 26] * length for i in range(count)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": prompts(150, 2000), "prompt_logprobs": 20, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": prompts(150, 2000), "logprobs": 20, "echo": True, "max_tokens": 0}),
        (COMPLETIONS, {"prompt": prompts(20, 1000), "prompt_logprobs": 5, "max_tokens": 1, "n": 100}),
        (COMPLETIONS, {"prompt": prompts(20, 2000), "echo": True, "max_tokens": 1, "n": 128}),
        (COMPLETIONS, {"prompt": prompts(20, 2000), "return_token_ids": True, "max_tokens": 1, "n": 128}),
        (COMPLETIONS, {"prompt": "LOOP(", "max_tokens": 8000, "n": 10, "logprobs": 20}),
        (COMPLETIONS, {"prompt": "LOOP(", "max_tokens": 8000, "n": 10, "logprobs": 20, "stream": True}),
        (COMPLETIONS, {"prompt": "LOOP(", "max_tokens": 8000, "best_of": 10, "logprobs": 20}),
        (COMPLETIONS, {"prompt": "LOOP(", "max_tokens": 8000, "best_of": 10, "use_beam_search": True, "logprobs": 20}),
        (COMPLETIONS, {"prompt": ["LOOP("] * 1000, "max_tokens": 8000}),
        (CHAT, {**LOOP, "max_tokens": 8000, "n": 10, "logprobs": True, "top_logprobs": 20}),
        (CHAT, {**LOOP, "n": 128, "logprobs": True, "top_logprobs": 20}),
        (RESPONSES, {"input": "LOOP(", "max_output_tokens": 8000, "include": ["message.output_text.logprobs"],
                     "top_logprobs": 20}),
    ],
)  # fmt: skip
def test_answers_that_would_be_too_large_are_refused(server: RunningServer, path: str, body: Any) -> None:
    before = len(server.engine.requests)
    response = server.post(path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "answer_too_large"
    assert "--max-answer-size" in error["message"]
    assert str(64 * 2**20) in error["message"]
    assert len(server.engine.requests) == before


def test_usual_requests_are_far_from_the_limit(server: RunningServer) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": ["SAY(a)YAS"] * 500, "max_tokens": 256}),
        (COMPLETIONS, {"prompt": "SAY(a)YAS", "n": 128, "max_tokens": 2000}),
        (COMPLETIONS, {"prompt": prompts(8, 1000), "echo": True, "logprobs": 5, "max_tokens": 0}),
        (CHAT, {"messages": [{"role": "user", "content": "SAY(a)YAS"}], "logprobs": True, "top_logprobs": 20, "n": 4}),
        (MESSAGES, {"messages": [{"role": "user", "content": "SAY(a)YAS"}], "max_tokens": 8000}),
    ):
        assert server.post(path, body).status_code == 200


@pytest.mark.parametrize("generation_config", [None, swept({"max_new_tokens": 2000})])
def test_who_does_not_say_how_many_tokens_gets_as_many_as_fit(
    start_server: StartServer, generation_config: dict[str, int] | None
) -> None:
    limits = AdmissionLimits(max_answer_bytes=1100 * (16 + 4 * LIKELY_TOKEN))
    small = start_server(admission=limits, override_generation_config=generation_config)
    body = {**LOOP, "logprobs": True, "top_logprobs": 3}
    answer = small.post(CHAT, body).json()
    assert answer["usage"]["completion_tokens"] == 1100
    assert answer["choices"][0]["finish_reason"] == "length"
    assert small.post(CHAT, {**body, "max_tokens": 1101}).json()["error"]["code"] == "answer_too_large"
    assert small.post(CHAT, {**body, "n": 2}).json()["error"]["code"] == "answer_too_large"  # too few are left for each


def whole_and_parsed(response: bytes) -> Any:
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    if b"transfer-encoding: chunked" not in head:
        assert b"content-length: %d" % len(body) in head
        return json.loads(body)
    content = b""
    while not body.startswith(b"0\r\n"):
        size, _, body = body.partition(b"\r\n")
        content, body = content + body[: int(size, 16)], body[int(size, 16) + 2 :]
    assert body == b"0\r\n\r\n"
    return json.loads(content)


def ask(server: Any, path: str, body: Any, version: str) -> bytes:
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = f"POST {path} HTTP/{version}\r\nhost: test\r\ncontent-type: application/json\r\nconnection: close\r\n"
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        return read_all(connection)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": prompts(3, 300), "prompt_logprobs": 20, "logprobs": 20, "n": 2, "max_tokens": 100}),
        swept(COMPLETIONS, {"prompt": prompts(3, 300), "echo": True, "logprobs": 20, "n": 2, "max_tokens": 100}),
        (CHAT, {**LOOP, "prompt_logprobs": 20, "logprobs": True, "top_logprobs": 20, "n": 2, "max_tokens": 300}),
    ],
)
def test_large_answers_are_whole(server: RunningServer, path: str, body: Any) -> None:
    large, old = ask(server, path, body, "1.1"), ask(server, path, body, "1.0")
    assert b"transfer-encoding: chunked" in large
    assert b"content-length" in old
    answers = [whole_and_parsed(response) for response in (large, old)]
    for answer in answers:
        del answer["id"], answer["created"], answer["usage"]["prompt_tokens_details"]
    assert answers[0] == answers[1]
    for choice in answers[0]["choices"]:
        logprobs = choice["logprobs"]
        tokens = logprobs["content"] if path == CHAT else logprobs["tokens"]
        assert len(tokens) == (body["max_tokens"] if path == CHAT else 303 if "echo" in body else 3)
        if path == COMPLETIONS:
            assert {len(column) for column in logprobs.values()} == {len(tokens)}


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


@pytest.mark.parametrize("length", [1, 255, 256, 257, 600])
def test_a_streamed_echo_is_told_in_pieces(server: RunningServer, length: int) -> None:
    body = {"prompt": prompts(1, length)[0], "echo": True, "logprobs": 2, "n": 2, "return_token_ids": True}
    whole = server.post(COMPLETIONS, body).json()["choices"]
    chunks = events(server.post(COMPLETIONS, {**body, "stream": True}))
    for index, expected in enumerate(whole):
        pieces = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(piece["text"] for piece in pieces) == expected["text"]
        assert pieces[-1]["finish_reason"] == expected["finish_reason"]
        assert [piece["prompt_token_ids"] for piece in pieces if "prompt_token_ids" in piece] == [body["prompt"]]
        assert joined(piece.get("token_ids", []) for piece in pieces) == expected["token_ids"]
        told = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        assert all(len(one["tokens"]) <= 257 for one in told)
        for column, values in expected["logprobs"].items():
            assert joined(one[column] for one in told) == values


def test_others_are_served_while_a_large_answer_is_made(server: RunningServer) -> None:
    body = {**LOOP, "logprobs": True, "top_logprobs": 20, "n": 8, "max_tokens": 1000}
    done = threading.Event()
    sizes: list[int] = []

    def read() -> None:
        sizes.append(len(ask(server, CHAT, body, "1.1")))
        done.set()

    reader = threading.Thread(target=read)
    before = server.engine.stats().generation_tokens_total
    reader.start()
    while server.engine.stats().generation_tokens_total < before + 8000:
        time.sleep(0.01)
    answered = 0
    while not done.is_set():
        assert server.http.get("/health").status_code == 200
        answered += 1
    reader.join()
    assert sizes[0] > 5 * 2**20
    assert answered > 3, "the event loop makes the answer in many short pieces"


# A process starts, and has a second to make more than is read.
@pytest.mark.sweep
def test_a_large_answer_is_made_no_faster_than_it_is_read(start_process: StartProcess) -> None:
    server = start_process("--disable-access-log")
    resident = memory(server)
    body = {"prompt": prompts(15, 1500), "prompt_logprobs": 20, "max_tokens": 1}
    slow: Any = post_raw(server, body)  # type: ignore[arg-type]
    assert slow.recv(12) == b"HTTP/1.1 200"
    for _ in range(10):
        assert server.client.get("/health").status_code == 200
        time.sleep(0.1)
    assert memory(server) - resident < 32 * 2**20  # the numbers take a third of it, and whole the answer would take 100
    received, end = 12, b""
    while end != b"\r\n0\r\n\r\n":
        piece = slow.recv(2**20)
        received, end = received + len(piece), (end + piece)[-7:]
    slow.close()
    assert received > 20 * 2**20
