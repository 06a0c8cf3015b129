"""A stand-in for an OpenAI-compatible server: one token a word, two tokens a chunk, no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TOKENS_PER_CHUNK = 2
BOS_TOKENS = 1


@dataclass(frozen=True)
class StubServer:
    """Where the stub listens, and the bodies it was sent."""

    url: str
    requests: list[dict[str, Any]]


def build_stub(requests: list[dict[str, Any]]) -> Starlette:
    """The stub as an ASGI application; `requests` receives every body of a generation request."""

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "stub", "object": "model"}]})

    async def health(_: Request) -> Response:
        return Response()

    async def generate(request: Request) -> Response:
        body = await request.json()
        requests.append(body)
        if body["model"] == "refused":
            return JSONResponse({"error": {"message": "no such model", "code": 404}}, status_code=404)
        chat = request.url.path.endswith("chat/completions")
        text = body["messages"][0]["content"] if chat else body["prompt"]
        if not isinstance(text, str):
            text = " ".join(part.get("text", "") for part in text)
        usage = {"prompt_tokens": BOS_TOKENS + len(text.split()), "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            return JSONResponse({"choices": [{"index": 0, "text": "word"}], "usage": usage})
        breaks = body["model"] == "broken"
        return StreamingResponse(_frames(chat, body["max_tokens"], usage, breaks), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/health", health),
            Route("/v1/completions", generate, methods=["POST"]),
            Route("/v1/chat/completions", generate, methods=["POST"]),
        ]
    )


async def _frames(chat: bool, max_tokens: int, usage: dict[str, int], breaks: bool) -> AsyncIterator[bytes]:
    def frame(choice: dict[str, Any]) -> bytes:
        return f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}\n\n".encode()

    if chat:
        yield frame({"delta": {"role": "assistant", "content": ""}})
    for _ in range(0, max_tokens, TOKENS_PER_CHUNK):
        await asyncio.sleep(0.002)
        yield frame({"delta": {"content": "two words "}} if chat else {"text": "two words "})
    if breaks:
        yield b'data: {"error": {"message": "out of memory"}}\n\n'
        return
    yield frame({"delta": {}, "finish_reason": "length"} if chat else {"text": "", "finish_reason": "length"})
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()
