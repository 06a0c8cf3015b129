"""Dispatcher: has each request answered by the model that it names, which is loaded first if it has to be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tidewheel.engine.errors import BusyError
from tidewheel.engine.hosting.units import Progress

from ..api.body import whole_body
from ..api.json_response import json_response
from ..api.responses import NEEDS_MODEL
from ..client_watch import client_watch
from ..errors import ClientGone
from ..http.api_keys import current_tenant
from ..local_path import local_path
from ..ollama.answers import loaded as loaded_answer
from .adapter_names import adapter_of, noted
from .asked_model import asked_model, has_no_prompt, without_keep_alive
from .catalog import ModelEntry
from .hosted_models import HostedModels, shutting_down
from .unit import LoadedModel
from .waiting_stream import WaitingStream, waits_in_words

_OF_OLLAMA: Mapping[str, Literal["chat", "generate"]] = {"/api/chat": "chat", "/api/generate": "generate"}
_SMALL = 2**18  # bytes of a body that never waits for the large ones of others
_MOST_WAITING = 256 * 2**20  # bytes of all bodies together that wait for models

TICK_S = 1.0
"""Between two comments to a client that waits."""


class Dispatcher:
    """Answers requests that are for a model."""

    def __init__(self, models: HostedModels) -> None:
        self._models = models
        self._waiting_bytes = 0

    @contextmanager
    def waiting(self, num_bytes: int) -> Iterator[None]:
        """A body of that size waits for its model. Raises BusyError if too much waits."""
        if num_bytes > _SMALL and self._waiting_bytes + num_bytes > _MOST_WAITING:
            raise BusyError("too many large requests wait for models: try again in a few seconds")
        self._waiting_bytes += num_bytes
        try:
            yield
        finally:
            self._waiting_bytes -= num_bytes

    async def answer_of_encoder(self, request: Request) -> Response:
        """The same for what encoders answer, whose default is the first encoder."""
        return await self.answer(request, by_encoder=True)

    async def answer(self, request: Request, *, by_encoder: bool = False) -> Response:
        """The answer of the model that a request names, which is leased until it is complete. Raises ApiError."""
        body = await whole_body(request)
        asked = asked_model(body)
        adapter, catalog = adapter_of(request, body), self._models.catalog
        name = asked.name or request.query_params.get("model")
        if name is None and adapter is not None and await self._models.find_known(adapter) is not None:
            name = adapter
        if name is None and by_encoder:
            entry = await self._models.default_encoder()
        else:
            entry = await self._models.find_asked(name)
        on_status = None
        if adapter is not None:
            on_status = noted(request, catalog, adapter, entry, is_shared=self._models.shares_adapters)
        if asked.keep_alive_s is None:
            return _Answer(self, self._models, entry, body, streams=asked.streams, on_status=on_status)
        # Who else may use the server may not say what stays loaded for all.
        keep_alive_s = asked.keep_alive_s if current_tenant().administers else None
        kind = _OF_OLLAMA.get(local_path(request.scope))
        if keep_alive_s == 0 and kind is not None and has_no_prompt(body):
            if self._models.is_ready(entry):
                async with self._models.lease(entry, keep_alive_s=0):
                    pass
            return json_response(loaded_answer(asked.name or entry.name, kind, reason="unload"))
        body = without_keep_alive(body)
        return _Answer(
            self,
            self._models,
            entry,
            body,
            streams=asked.streams,
            on_status=on_status,
            keep_alive_s=keep_alive_s,
        )


class _Answer(Response):
    """A model's answer to a request that has been read."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        models: HostedModels,
        entry: ModelEntry,
        body: bytearray,
        *,
        streams: bool,
        on_status: Callable[[int], None] | None = None,
        keep_alive_s: float | None = None,
    ) -> None:
        super().__init__()
        self._on_status = on_status
        self._dispatcher = dispatcher
        self._models = models
        self._entry = entry
        self._keep_alive_s = keep_alive_s
        self._read = _Read(body)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except BaseException:
            if self._on_status is not None:
                self._on_status(HTTPStatus.INTERNAL_SERVER_ERROR)
            raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._models.is_ready(self._entry):
            async with self._models.lease(self._entry, keep_alive_s=self._keep_alive_s) as loaded:
                await self._pass_on(loaded, scope, receive, send)
            return
        stream = WaitingStream(scope, send) if self._streams and waits_in_words(scope) else None
        try:
            async with self._wait(receive, stream) as loaded:
                begun = stream is not None and stream.has_begun
                await self._pass_on(loaded, scope, receive, stream.pass_on if stream is not None and begun else send)
        except Exception as failure:
            if stream is None or not stream.has_begun:
                raise
            if isinstance(failure, ClientGone):
                failure.__traceback__ = None  # whose frames know it: only a collection of garbage could free them
                await stream.end()
            else:
                await stream.fail(failure)

    async def _pass_on(self, loaded: LoadedModel, scope: Scope, receive: Receive, send: Send) -> None:
        going_on: list[Callable[[], Awaitable[None]]] = []
        if self._on_status is not None:
            send = _telling(self._on_status, send)
        try:
            await loaded.app(self._entry.name)({**scope, NEEDS_MODEL: going_on}, self._read.then(receive), send)
        finally:
            for ended in going_on:
                await ended()

    @asynccontextmanager
    async def _wait(self, receive: Receive, stream: WaitingStream | None) -> AsyncIterator[LoadedModel]:
        """The model, loaded. Tells the stream meanwhile. Raises ClientGone if the client leaves first."""
        progress = Progress("waiting")

        def report(now: Progress) -> None:
            nonlocal progress
            progress = now

        async with AsyncExitStack() as stack:
            lease = self._models.lease(self._entry, keep_alive_s=self._keep_alive_s, report=report)
            entering = asyncio.ensure_future(stack.enter_async_context(lease))
            has_left = False

            def leave() -> None:
                nonlocal has_left
                has_left = True
                entering.cancel()

            try:
                with client_watch(receive, leave), self._dispatcher.waiting(self._read.num_bytes):
                    while not entering.done():
                        if stream is not None:
                            await stream.tell(self._entry.name, progress)
                        await asyncio.wait([entering], timeout=TICK_S)
                        if self._models.is_draining:
                            raise shutting_down()
            finally:
                entering.cancel()
                await asyncio.wait([entering])
            if has_left:
                raise ClientGone
            yield entering.result()


def _telling(on_status: Callable[[int], None], send: Send) -> Send:
    """`send`, and `on_status` is told the answer's status."""

    async def tell_and_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            on_status(message["status"])
        await send(message)

    return tell_and_send


class _Read:
    """A body that was read already, and is given to the model once."""

    def __init__(self, body: bytes | bytearray) -> None:
        self._message: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self.num_bytes = len(body)

    def then(self, receive: Receive) -> Receive:
        """What gives the body first, and then what is received."""

        async def receive_again() -> Message:
            if self._message is None:
                return await receive()
            message, self._message = self._message, None
            return message

        return receive_again
