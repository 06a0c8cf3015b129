"""uvicorn's HTTP connections, with limits on the size of a request and on the time to send it and to read its answer.

A timer runs only while a request arrives or while the write buffer is full. So the limits cost streamed tokens nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar, cast

from ..errors import ApiError, bad_request
from .limits import ConnectionLimits
from .no_pipelining import Flow, NoPipelining

logger = logging.getLogger(__name__)

# An ASGI extension for streamed responses. After the start of a response, `write(data)` sends a piece of its body at
# once. It returns False if the client reads too slowly. The response must then call `send`, which waits for the client.
# It must also end with a `send`.
DIRECT_WRITE = "tidewheel.direct_write"

_VERSIONS = ("1.0", "1.1")
_MIN_BYTES_PER_S = 500  # a sender that is slower uses up its `read_timeout_s`, one that is faster gets it back
# How long the rest of a refused request is read: a close with something unread resets the connection, and a client that
# sends all of its request first would not see why.
_LINGER_S = 30.0
_LINGER_IDLE_S = 5.0  # without anything that arrives


def connection_class(limits: ConnectionLimits, *, direct_write: bool) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn, whose connections enforce `limits`.

    `direct_write` offers the extension DIRECT_WRITE. What is written with it does not go through the middleware.
    """
    members = {"limits": limits, "direct_write": direct_write}
    return cast(type[asyncio.Protocol], type("LimitedConnection", (Connection,), members))


class Refused(Exception):  # noqa: N818 - not an error of this server
    """Ends the parsing of a request that has been refused."""


class Connection(NoPipelining):
    """One client's connection."""

    limits: ClassVar[ConnectionLimits]
    direct_write: ClassVar[bool]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._send_by: float | None = (
            None  # on the loop's clock, when the next bytes must be there; None between requests
        )
        self._linger_timer: asyncio.TimerHandle | None = None
        self._drop_timer: asyncio.TimerHandle | None = None
        self._lingers_until = 0.0
        self._has_heard = False  # since the linger timer last fired
        self._request_bytes = 0
        self._in_head = False
        self._refusal: ApiError | None = None
        self._deaf = False  # if True, all that arrives is ignored

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        for timer in (self._read_timer, self._write_timer, self._linger_timer, self._drop_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._deaf:
            super().data_received(data)
        self._has_heard = True

    def eof_received(self) -> bool | None:  # type: ignore[override]
        return None if self._linger_timer is not None else super().eof_received()

    def feed(self, piece: bytes | bytearray) -> None:
        super().feed(piece)
        if self._deaf:
            return
        if self._send_by is not None:
            self._request_bytes += len(piece)
            if (timeout := self.limits.read_timeout_s) is not None:
                later = self._send_by + len(piece) / _MIN_BYTES_PER_S
                self._send_by = min(later, self.loop.time() + timeout)
            if self._in_head and self._request_bytes > self.limits.max_header_bytes:
                self._refuse(self._header_error())
        elif not self.is_answering:
            self._await_request()  # line ends between requests have stopped the timer

    @property
    def is_within_request(self) -> bool:
        return self._send_by is not None

    @property
    def idle_since(self) -> float | None:
        """When it became idle, on the loop's clock; None while there is a request or an answer."""
        timer = self.timeout_keep_alive_task
        if timer is None or self.is_within_request or self.is_answering or self.transport.get_write_buffer_size():
            return None
        return timer.when() - self.timeout_keep_alive

    def close_idle(self) -> None:
        """Give the connection up for another one."""
        self.transport.close()

    def refuse_incomplete(self) -> None:
        self._refuse(bad_request("the request ended before it was complete", code="invalid_http"), lingers=False)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._request_bytes = 0
        self._send_by = self.loop.time() + (self.limits.read_timeout_s or 0)
        if self._read_timer is None and self.limits.read_timeout_s is not None:
            self._read_timer = self.loop.call_later(self.limits.read_timeout_s, self._check_sender)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self.limits.max_header_count:
            self._refusal = self._header_error()
            raise Refused

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.limits.max_header_bytes:
            self._refusal = self._header_error()
            raise Refused
        if self.parser.get_http_version() not in _VERSIONS:
            self._refusal = bad_request(
                "the request's first line does not end with HTTP/1.1 or HTTP/1.0, the supported versions",
                code="invalid_http",
            )
            raise Refused
        super().on_headers_complete()
        self._in_head = False
        if not self.cycle.keep_alive and (self._body_left or self._is_chunked()):
            self.cycle.transport = cast(asyncio.Transport, _ClosesGently(self.transport, self._close_gently))
        if self.direct_write:
            self.scope["extensions"] = {DIRECT_WRITE: {"write": _chunk_writer(self.transport, self.flow)}}

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._send_by = None  # the timer checks this when it fires
        if self._drop_timer is not None:
            self._drop_timer.cancel()
            self._drop_timer = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or bad_request(msg, code="invalid_http"))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._await_reader()
        elif self.is_within_request and self._drop_timer is None:
            self._drop_timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # `close` would wait for the client, which has not read for all this time
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _await_request(self) -> None:
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            handler = self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)

    def _await_reader(self) -> None:
        if self._write_timer is None and self.limits.write_timeout_s is not None:
            self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self._drop_reader)

    def _drop_reader(self) -> None:
        logger.warning("Dropped %s, which did not read its answer for %g s", self._peer(), self.limits.write_timeout_s)
        self.transport.abort()

    def _check_sender(self) -> None:
        self._read_timer = None
        send_by, timeout = self._send_by, self.limits.read_timeout_s
        if send_by is None or timeout is None or self.transport.is_closing() or self._linger_timer is not None:
            return
        if self.flow.read_paused:  # the server is slow, not the client
            send_by = self._send_by = self.loop.time() + timeout
        left = send_by - self.loop.time()
        if left > 0:
            self._read_timer = self.loop.call_later(left, self._check_sender)
            return
        logger.warning("Dropped %s, which did not send its request for %g s", self._peer(), timeout)
        error = ApiError(
            HTTPStatus.REQUEST_TIMEOUT, f"the request did not arrive within {timeout:g} s (--read-timeout)"
        )
        self._refuse(error, lingers=False)

    def _refuse(self, error: ApiError, *, lingers: bool = True) -> None:
        """Answer a request that the application will not see, and close the connection."""
        self._deaf = True
        if self._send_by is not None and not self._in_head and self.cycle.response_started:
            self.transport.close()
            return
        body = error.body()
        head = (
            f"HTTP/1.1 {int(error.status)} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if lingers:
            self._linger()
        else:
            self.transport.close()

    def _close_gently(self) -> None:
        """Close the connection behind an answer; if its request is still arriving, when that has ended."""
        if self.is_within_request and not self._has_ended:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close the connection when the client has, or in a while. What arrives until then is dropped."""
        self._deaf = True
        self._ahead.clear()
        self.flow.hold(False)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._lingers_until = self.loop.time() + _LINGER_S
        self._has_heard = False
        self._linger_timer = self.loop.call_later(_LINGER_IDLE_S, self._check_lingering)

    def _check_lingering(self) -> None:
        if self._has_heard and self.loop.time() < self._lingers_until:
            self._has_heard = False
            self._linger_timer = self.loop.call_later(_LINGER_IDLE_S, self._check_lingering)
        else:
            self.transport.abort()

    def _is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers)

    def _header_error(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the request's head is over this server's limits of {self.limits.max_header_bytes} bytes "
            f"(--max-header-size) and {self.limits.max_header_count} headers (--max-header-count)",
            code="headers_too_large",
        )

    def _peer(self) -> str:
        return "{}:{}".format(*self.client) if self.client else "a client"


class _ClosesGently:
    """A transport that an answer is written to, whose `close` is another one."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


def _chunk_writer(transport: asyncio.Transport, flow: Flow) -> Callable[[bytes], bool]:
    """`RequestResponseCycle.send` for more of a chunked body, without the checks that its first part has passed.

    It does not know that cycle, which knows it: only a collection of garbage could free them.
    """

    def write(data: bytes) -> bool:
        if not flow.is_disconnected:  # `receive` reports that
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not flow.write_paused

    return write
