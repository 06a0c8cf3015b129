"""One request of a connection at a time: the next one is parsed after the last one was answered.

uvicorn itself parses everything that has arrived, and keeps all requests in it. One read may have thousands of them.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_END_OF_HEAD = b"\r\n\r\n"  # a chunked body ends like this too
_LONGEST_PIECE = 2**14  # bytes; a longer piece could have so many chunks that the parser takes long
_TURN = 2**14  # bytes to parse before the event loop does something else
_MIN_COST = 2**8  # bytes; a short piece takes as long as one of this length
_MAX_AHEAD = 2**14  # bytes of later requests to hold; beyond that, nothing is read until some have been parsed

_ANY_ANSWER = b"HTTP/1.1 "  # every answer begins like this
_FIRST_PROBE_S = 0.1


class NoPipelining(HttpToolsProtocol):
    """uvicorn's connection, whose parser gets bytes only up to the end of the current request.

    Later requests wait unparsed. If they are large, nothing more is read. A client that closes its sending side after a
    request still gets the answer. With TLS this is not possible: it closes both sides together. Subclasses define
    `refuse_incomplete`, which answers a request that ends too soon.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ahead = bytearray()
        self._body_left = 0  # bytes, if the request has declared its length
        self._drops_upgrade = False
        self._has_ended = False  # whether the client has closed its sending side
        self._turn: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.flow: Flow = Flow(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ahead.clear()
        self.flow.is_disconnected = True
        super().connection_lost(exc)
        if self.cycle is not None:
            if isinstance(self.cycle.transport, _Probe):
                self.cycle.transport.end()
            # Neither knows the other any more: only a collection of garbage could free them.
            self.cycle.transport = self.transport
            self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._ahead += data
        self._parse()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        if self.scheme == "https":
            return None
        self._has_ended = self.flow.reads_no_more = True
        self._parse()
        return not self.transport.is_closing()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._drops_upgrade = True
            raise _ParseAgain
        super().on_headers_complete()
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        self._body_left = int(length)  # the parser has checked it

    def on_body(self, body: bytes) -> None:
        self._body_left = max(self._body_left - len(body), 0)
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._parse()

    def refuse_incomplete(self) -> None:
        """Answer a client that has closed its sending side within a request."""
        self.transport.close()

    @property
    def is_answering(self) -> bool:
        """Whether the application has a request whose answer is not complete."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    @property
    def is_within_request(self) -> bool:
        """Whether a part of a request has arrived, but not all of it."""
        raise NotImplementedError

    def feed(self, piece: bytes | bytearray) -> None:
        """Parse bytes of one request."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserError:
            if self._drops_upgrade:
                self._parse_without_upgrade()
                return
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def _parse(self) -> None:
        """Parse what has arrived, up to the end of a request."""
        if self._turn is not None:
            return
        ahead, cost = self._ahead, 0
        while ahead and self._may_parse():
            if cost >= _TURN:
                self._turn = self.loop.call_soon(self._go_on)
                break
            size = self._next_piece()
            if not size:
                break
            cost += _MIN_COST if self._body_left else max(size, _MIN_COST)
            piece = ahead[:size]
            del ahead[:size]
            self.feed(piece)
        if self.transport.is_closing():
            ahead.clear()
        elif self._has_ended and self._turn is None:
            self._answer_the_last()
        self.flow.hold(len(ahead) > _MAX_AHEAD)

    def _go_on(self) -> None:
        self._turn = None
        self._parse()

    def _may_parse(self) -> bool:
        return not (self.transport.is_closing() or (self.is_answering and not self.cycle.more_body))

    def _next_piece(self) -> int:
        """How many bytes certainly belong to the current request."""
        ahead = self._ahead
        if self._body_left:
            return min(len(ahead), self._body_left)
        end = ahead.find(_END_OF_HEAD, 0, _LONGEST_PIECE)
        if end >= 0:
            return end + len(_END_OF_HEAD)
        size = min(len(ahead), _LONGEST_PIECE)
        if self._has_ended:
            return size
        # Hold a partial end of a head back: with its rest, bytes of the next request may arrive.
        return size - next((n for n in (3, 2, 1) if ahead.endswith(_END_OF_HEAD[:n], 0, size)), 0)

    def _parse_without_upgrade(self) -> None:
        """Parse a head again without its `Upgrade` header: with it, the parser would ignore the body."""
        self._drops_upgrade = False
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.feed(b"\r\n".join(lines) + _END_OF_HEAD)

    def _answer_the_last(self) -> None:
        """Finish the connection: the client sends nothing more."""
        if self.is_within_request:
            self.refuse_incomplete()
        elif not self.is_answering:
            self.transport.close()
        elif not self.cycle.response_started and not isinstance(self.cycle.transport, _Probe):
            _Probe(self.cycle, self.loop)


class _ParseAgain(Exception):  # noqa: N818 - not an error
    """Ends the parsing of a head that must be parsed again in another way."""


class Flow(FlowControl):
    """Flow control that reads nothing while a connection holds as much as it may, and nothing after its end."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.is_disconnected = False
        self.reads_no_more = False
        self._holds_enough = False

    def hold(self, enough: bool) -> None:
        """Say whether the connection holds as much as it may."""
        if enough != self._holds_enough:
            self._holds_enough = enough
            if enough:
                self.pause_reading()
            else:
                self.resume_reading()

    def resume_reading(self) -> None:
        if not (self._holds_enough or self.reads_no_more):
            super().resume_reading()


class _Probe:
    """A transport to a client that has closed its sending side, to find out whether it is still there.

    A client that has left looks the same until something is sent to it. Then it resets the connection, which is noticed
    at the next send. So the probe sends the bytes that every answer begins with, one at a time, before the answer.
    """

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._loop = loop
        self._transport = cycle.transport
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None
        cycle.transport = cast(asyncio.Transport, self)
        self._send()

    def write(self, data: bytes) -> None:
        """The answer begins."""
        self.end()
        self._transport.write(data[self._sent :])

    def close(self) -> None:
        self.end()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _send(self) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_ANY_ANSWER[self._sent : self._sent + 1])
        self._sent += 1
        if self._sent < len(_ANY_ANSWER):
            self._timer = self._loop.call_later(_FIRST_PROBE_S * 2 ** (self._sent - 1), self._send)

    def end(self) -> None:
        """Leave the connection to the answer."""
        self._cycle.transport = self._transport
        if self._timer is not None:
            self._timer.cancel()
