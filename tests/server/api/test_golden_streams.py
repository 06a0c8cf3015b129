"""Event streams byte for byte, as tests/server/golden keeps them, except ids and times.

With TIDEWHEEL_UPDATE_GOLDEN=1 in the environment they are written instead of compared.
"""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from server.conftest import RunningServer, StartServer
from server.scripted_engine import ScriptedEngine

from tidewheel.engine.core.request import Request
from tidewheel.engine.core.stream import RequestStream, Sink
from tidewheel.engine.outputs import RequestOutput

GOLDEN = Path(__file__).with_name("golden")
VARIABLE = [
    (re.compile(rb'"id":"(chatcmpl|cmpl)-[0-9a-f]{32}"'), rb'"id":"\1-0"'),
    (re.compile(rb'id":"(call|resp|msg|rs|fc)_[0-9a-f]{24,36}"'), rb'id":"\1_0"'),
    (re.compile(rb'"(created|created_at|completed_at)":\d{10}'), rb'"\1":0'),
    (re.compile(rb'"request_id":"[0-9a-f]{32}"'), b'"request_id":"0"'),
    (re.compile(rb'"system_fingerprint":"fp_[0-9a-f]{12}"'), b'"system_fingerprint":"fp_0"'),
]


class OneTokenStream:
    """A stream whose outputs have one token each, however late they are read. For text of one byte a character."""

    def __init__(self, stream: RequestStream) -> None:
        self.choices = stream.choices
        self._stream = stream
        self._sink: Any = None
        self._ready: deque[RequestOutput] = deque()
        self._is_paused = False

    def read(self, sink: Sink[RequestOutput]) -> None:
        self._sink = sink
        self._stream.read(self)

    def pause(self) -> None:
        self._is_paused = True
        self._stream.pause()

    def resume(self) -> None:
        self._is_paused = False
        self._give()
        if not self._is_paused:
            self._stream.resume()

    def push(self, output: RequestOutput) -> None:
        self._ready.extend(_split(output))
        self._give()

    def end(self, failure: Exception | None) -> None:
        self._sink.end(failure)

    def abort(self) -> None:
        self._stream.abort()

    def _give(self) -> None:
        while self._ready and not self._is_paused:
            self._sink.push(self._ready.popleft())


def _split(output: RequestOutput) -> list[RequestOutput]:
    last = len(output.token_ids) - 1
    pieces = [
        RequestOutput(
            output.index,
            output.text[i : i + 1] if i < last else output.text[i:],
            (token,),
            output.logprobs and output.logprobs[i : i + 1],
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=None if i else output.prompt_logprobs,
            **({"finish_reason": output.finish_reason, "stop_reason": output.stop_reason, "error": output.error}
               if i == last else {}),
        )
        for i, token in enumerate(output.token_ids)
    ]  # fmt: skip
    return pieces or [output]


class OneTokenEngine(ScriptedEngine):
    def submit(self, request: Request) -> Any:
        return OneTokenStream(super().submit(request))


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    return start_server(OneTokenEngine(), tool_call_parser="hermes", reasoning_parser="qwen3")


TOOLS = [{"type": "function", "function": {"name": "add"}}]
TRANSCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("SAY(Hello.)YAS", {}),
    "logprobs": ("SAY(Hi)YAS", {"logprobs": True, "top_logprobs": 1}),
    "usage": ("SAY(Hi)YAS", {"stream_options": {"include_usage": True}}),
    "choices": ("SAY()YAS", {"n": 2}),
    "usage_all_along": (
        "SAY(Hi)YAS",
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "include_reasoning": False},
    ),
    "token_ids": ("SAY(Hi)YAS", {"return_token_ids": True}),
    "tools": ('SAY(Sure.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>)YAS', {"tools": TOOLS}),
    "reasoning": ("SAY(<think>\nhm\n</think>\n\nFour)YAS", {"stream_options": {"include_usage": True}}),
    "error": ("BREAK(", {}),
}


COMPLETIONS: dict[str, dict[str, Any]] = {
    "completion": {"prompt": "SAY(Hello, you.)YAS", "stream_options": {"include_usage": True}},
    "completion_choices": {"prompt": "SAY()YAS", "n": 2},
    "completion_echo": {"prompt": "A prompt of some tokens. SAY(Hi)YAS", "echo": True, "logprobs": 1},
    "completion_long_echo": {"prompt": "A long prompt. " * 40 + "SAY(Hi)YAS", "echo": True, "logprobs": 0},
    "completion_stop": {"prompt": "SAY(Hi there.)YAS", "stop": "the"},
    "completion_error": {"prompt": "BREAK("},
}


ALL = 'SAY(<think>hm</think>Sure.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>)YAS'
RESPONSES: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": (ALL, {"tools": [{"type": "function", "name": "add"}]}),
    "responses_incomplete": ("SAY(Hi)YAS", {"max_output_tokens": 1, "top_logprobs": 1}),
    "responses_error": ("BREAK(", {"store": False}),
    "responses_background": ("SAY(Hi)YAS", {"background": True}),
}
MESSAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": (ALL, {"tools": [{"name": "add", "input_schema": {"type": "object"}}]}),
    "messages_stop_sequence": ("SAY(Hi there.)YAS", {"stop_sequences": ["the"], "system": "Be brief."}),
    "messages_error": ("BREAK(", {}),
}


def check(server: RunningServer, name: str, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, {**body, "stream": True})
    assert response.status_code == 200
    received = response.content
    for pattern, replacement in VARIABLE:
        received = pattern.sub(replacement, received)
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("TIDEWHEEL_UPDATE_GOLDEN"):
        file.write_bytes(received)
    assert received.decode() == file.read_bytes().decode()


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_chat_completions(server: RunningServer, name: str) -> None:
    prompt, options = TRANSCRIPTS[name]
    body = {"messages": [{"role": "user", "content": prompt}], "cache_salt": name, **options}
    check(server, name, "/v1/chat/completions", body)


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(server: RunningServer, name: str) -> None:
    check(server, name, "/v1/completions", {"cache_salt": name, **COMPLETIONS[name]})


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(server: RunningServer, name: str) -> None:
    prompt, options = RESPONSES[name]
    check(server, name, "/v1/responses", {"input": prompt, "cache_salt": name, **options})


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(server: RunningServer, name: str) -> None:
    prompt, options = MESSAGES[name]
    # The name is before what others have in common, so that nothing is found in the cache.
    content = [{"type": "text", "text": name}, {"type": "text", "text": prompt}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 200, **options}
    check(server, name, "/v1/messages", body)
