"""WaitingStream: a streamed answer that begins before its model is loaded, with comments that say how far it is."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

from tidewheel.engine.hosting.units import Progress

from ..errors import REFUSAL, as_api_error
from ..generation.frames import DONE
from ..generation.streaming import EVENT_STREAM_HEADERS
from ..local_path import local_path

_OPENAI = frozenset({"/chat/completions", "/completions", "/responses", "/invocations"})
_ANTHROPIC = frozenset({"/messages"})


def waits_in_words(scope: Scope) -> bool:
    """Whether a streamed answer of this path consists of events, so that it can have comments."""
    return _path(scope) in _OPENAI | _ANTHROPIC


class WaitingStream:
    """Once it `tell`s something, the answer has begun, with status 200. What fails after that is an error event."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._refused = False
        self._error = bytearray()
        self.has_begun = False

    async def tell(self, name: str, progress: Progress) -> None:
        """Send a comment, which clients skip: how far a model is."""
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": EVENT_STREAM_HEADERS})
        how_far = f"{progress.fraction:.0%}" if progress.fraction else progress.stage
        await self._body(f": loading {name} {how_far}\n\n".encode(), more=True)

    async def pass_on(self, message: Message) -> None:
        """Takes the messages of the model's own answer, and sends what the client does not have yet."""
        if message["type"] == "http.response.start":
            content_type = Headers(raw=message["headers"]).get("content-type", "")
            self._refused = not content_type.startswith("text/event-stream")
        elif not self._refused:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body"):
                await self._body(self._event(bytes(self._error)), more=False)

    async def fail(self, failure: Exception) -> None:
        """End the answer with an error event."""
        error = as_api_error(failure)
        self._scope["state"][REFUSAL] = error.message
        is_anthropic = _path(self._scope) in _ANTHROPIC
        body = error.anthropic_body(self._scope["state"]["request_id"]) if is_anthropic else error.body()
        await self._body(self._event(body), more=False)

    async def end(self) -> None:
        """End the answer, which nobody reads any more."""
        await self._body(b"", more=False)

    def _event(self, body: bytes) -> bytes:
        if _path(self._scope) in _ANTHROPIC:
            return b"event: error\ndata: " + body + b"\n\n"
        return b"data: " + body + b"\n\n" + DONE

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _path(scope: Scope) -> str:
    return local_path(scope).removeprefix("/v1")
