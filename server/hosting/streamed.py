"""Streamed: an answer that is what an asynchronous iterator yields, for as long as the client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..client_watch import client_watch
from ..errors import ApiError, as_api_error


class Streamed(Response):
    """Sends each piece when it comes. `pieces` is closed in the end, and when the client hangs up.

    The response starts with the first piece, so what fails before it is answered with an error's status. A later
    failure ends the stream with what `failed` makes of it.
    """

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], content_type: bytes, failed: Callable[[ApiError], bytes]
    ) -> None:
        super().__init__()
        self._pieces = pieces
        self._content_type = content_type
        self._failed = failed
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        try:
            with client_watch(receive, sending.cancel):
                await asyncio.wait([sending])
        finally:
            sending.cancel()
        if not sending.cancelled():
            sending.result()

    async def _send_all(self, send: Send) -> None:
        try:
            async with aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    await self._send(send, piece)
        except Exception as error:
            if not self._has_started:
                raise
            await self._send(send, self._failed(as_api_error(error)))
        await self._send(send, b"", is_last=True)

    async def _send(self, send: Send, piece: bytes, *, is_last: bool = False) -> None:
        if not self._has_started:
            self._has_started = True
            headers = [
                (b"content-type", self._content_type),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # nginx would collect pieces otherwise
            ]
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
        await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
