"""AppClient: requests to an application in this process, without a socket."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message

from ..ids import new_id


class AppClient:
    """Asks an ASGI application, as a client on this machine would."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def get(self, path: str) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        return await self._ask("GET", path, b"", [])

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """The same for a body of JSON. Cancelling it aborts the request."""
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        return await self._ask("POST", path, body, headers)

    async def _ask(self, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes]:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
            "state": {"request_id": new_id()},
        }
        sent: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status, parts = 500, list[bytes]()

        async def receive() -> Message:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()  # this client does not hang up
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, b"".join(parts)
