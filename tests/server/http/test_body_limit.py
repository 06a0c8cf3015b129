"""Large bodies that arrive together have a bound together; small ones are never refused for them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from tidewheel.server.api.body import whole_body
from tidewheel.server.http.middleware import BodyLimit, RequestId

MIB = 2**20


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    size = len(await whole_body(Request(scope, receive)))
    await PlainTextResponse(str(size))(scope, receive, send)


class Client:
    """Sends a body piece by piece."""

    def __init__(self, app: Any) -> None:
        self._pieces: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "client": None}

        async def send(message: Message) -> None:
            self.sent.append(message)

        self.task = asyncio.create_task(app(scope, self._pieces.get, send))

    async def give(self, size: int, *, more: bool = True) -> None:
        self._pieces.put_nowait({"type": "http.request", "body": b"a" * size, "more_body": more})
        for _ in range(10):  # for the application to take it in
            await asyncio.sleep(0)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None


def test_bodies_that_arrive_together() -> None:
    async def crowd() -> None:
        app = RequestId(
            BodyLimit(_echo, max_bytes=MIB, max_arriving_bytes=2 * MIB),
            root_path="",
            send_header=False,
            access_log=False,
        )
        parked = [Client(app) for _ in range(2)]
        for client in parked:
            await client.give(MIB)
        late, small = Client(app), Client(app)
        await late.give(MIB // 2)
        assert late.status == 503
        assert json.loads(late.sent[1]["body"])["error"]["code"] == "too_many_bodies"
        await small.give(1000)
        await small.give(1000, more=False)
        assert small.status == 200
        await parked[0].give(0, more=False)
        assert parked[0].status == 200
        again = Client(app)
        await again.give(MIB // 2)
        await again.give(0, more=False)
        assert again.status == 200
        parked[1].task.cancel()  # it has gone
        await asyncio.wait([parked[1].task])
        others = [Client(app) for _ in range(2)]
        for client in others:
            await client.give(MIB)
            assert client.status is None
        for client in others:
            client.task.cancel()

    asyncio.run(crowd())
