"""The server's application as a replica of Serve runs it."""

from __future__ import annotations

import logging
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidewheel.server.errors import ApiError, error_response
from tidewheel.server.local_path import local_path
from tidewheel.server.telemetry.adapter_metrics import ADAPTERS

from .prefixes import HEADER, HeldPrefixes, read_keys
from .replica_metrics import PATH, ReplicaMetrics

logger = logging.getLogger(__name__)

REPLICA = b"x-tidewheel-replica"
"""A response's header: which replica it is from. Serve's own errors do not have it."""

_OF_ONE = frozenset({"/reset_prefix_cache", "/models/load", "/models/unload"})
"""What would change only the replica that answers."""


class ReplicaApp:
    """Keeps the prefixes of the requests that come, and signs the responses.

    Each response has the request's id in Serve's own X-Request-Id, so the application's is left out. If there are
    several replicas, requests that would change only one of them are refused. Metrics are those of all replicas, for
    clients that may read this replica's.
    """

    def __init__(
        self, app: ASGIApp, name: str, held: HeldPrefixes, metrics: ReplicaMetrics, *, is_several: bool
    ) -> None:
        self._app = app
        self._name = name.encode("ascii", "replace")
        self._held = held
        self._metrics = metrics
        self._is_several = is_several
        self._has_warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        keys = [read_keys(value) for name, value in scope["headers"] if name == HEADER]
        if scope["method"] == "POST" and not keys and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Serve's proxies route by X-Session-Id alone, and do not repeat requests of a replica that ended: "
                "start Ray with RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=tidewheel.ray.proxy.middlewares"
            )
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name != HEADER]

        if self._is_several and (path := local_path(scope)) in _OF_ONE:
            error = ApiError(HTTPStatus.FORBIDDEN, f"{path} would reach one of several replicas: it needs a single one")
            await error_response(error)(scope, receive, send)
            return

        async def send_signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] < HTTPStatus.BAD_REQUEST:  # others were refused, and computed nothing
                    for one in keys:
                        self._held.add(one)
                headers = [header for header in message.get("headers", ()) if header[0].lower() != b"x-request-id"]
                message = {**message, "headers": [*headers, (REPLICA, self._name)]}
            await send(message)

        if scope["method"] == "GET" and local_path(scope) == PATH:
            await self._answer_metrics(scope, receive, send_signed)
        else:
            await self._app(scope, receive, send_signed)

    async def _answer_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application's own answer, with the metrics of all replicas in the place of its own."""
        start: Message | None = None
        own = bytearray()

        async def send_all(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.OK:
                start = message
            elif start is None:
                await send(message)
            elif message["type"] == "http.response.body":
                own.extend(message.get("body", b""))
                if message.get("more_body"):
                    return
                try:
                    body = (await self._metrics.text(names_adapters=ADAPTERS.encode() in own)).encode()
                except ApiError as error:
                    await error_response(error)(scope, receive, send)
                    return
                headers = [header for header in start["headers"] if header[0] != b"content-length"]
                await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
                await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, send_all)
