"""Event streams byte for byte, as tests/server/golden keeps them, but for ids and times.

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

from tidewheel.engine.request import Request, RequestOutput
from tidewheel.engine.stream import RequestStream

GOLDEN = Path(__file__).with_name("golden")
VARIABLE = [
    (re.compile(rb'"id":"chatcmpl-[0-9a-f]{32}"'), b'"id":"chatcmpl-0"'),
    (re.compile(rb'"id":"call_[0-9a-f]{24}"'), b'"id":"call_0"'),
    (re.compile(rb'"created":\d{10}'), b'"created":0'),
    (re.compile(rb'"system_fingerprint":"fp_[0-9a-f]{12}"'), b'"system_fingerprint":"fp_0"'),
]


class OneTokenStream:
    """A stream whose outputs have one token each, however late they are read. For text of one byte a character."""

    def __init__(self, stream: RequestStream) -> None:
        self.choices = stream.choices
        self._stream = stream
        self._ready: deque[RequestOutput] = deque()

    def __aiter__(self) -> OneTokenStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._ready:
            self._ready.extend(_split(await self._stream.__anext__()))
        return self._ready.popleft()

    def abort(self) -> None:
        self._stream.abort()


def _split(output: RequestOutput) -> list[RequestOutput]:
    last = len(output.token_ids) - 1
    pieces = [
        RequestOutput(
            output.index,
            output.text[i : i + 1] if i < last else output.text[i:],
            (token,),
            output.logprobs and output.logprobs[i : i + 1],
            num_cached_tokens=output.num_cached_tokens,
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
    "tools": ('SAY(Sure.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>)YAS', {"tools": TOOLS}),
    "reasoning": ("SAY(<think>\nhm\n</think>\n\nFour)YAS", {"stream_options": {"include_usage": True}}),
    "error": ("BREAK(", {}),
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_the_stream_is_the_same_to_the_byte(server: RunningServer, name: str) -> None:
    prompt, options = TRANSCRIPTS[name]
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True, "cache_salt": name, **options}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200
    received = response.content
    for pattern, replacement in VARIABLE:
        received = pattern.sub(replacement, received)
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("TIDEWHEEL_UPDATE_GOLDEN"):
        path.write_bytes(received)
    assert received.decode() == path.read_bytes().decode()
