"""PassedOn: an answer that another application gives, to a request whose body was read already."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class PassedOn(Response):
    """What `app` answers."""

    def __init__(self, app: ASGIApp, body: bytearray) -> None:
        super().__init__()
        self._app = app
        self._read: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_again() -> Message:
            read, self._read = self._read, None
            return await receive() if read is None else read

        await self._app(scope, receive_again, send)
