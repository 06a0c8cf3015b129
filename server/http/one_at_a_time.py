"""One request of a connection at a time: the next is parsed when the one before has been answered.

uvicorn parses whatever has come, and keeps each request that it finds: thousands in one read, for they may be tiny.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_END_OF_HEAD = b"\r\n\r\n"  # which a chunked body ends with too
_LONGEST_PIECE = 2**14  # bytes; more of them may hold as many chunks as take the parser a while
_TURN = 2**14  # bytes parsed before others have their turn
_LEAST_COST = 2**8  # a piece costs as much as that many bytes, however short it is
_MOST_AHEAD = 2**14  # bytes of later requests; with more, nothing is read until some have been parsed

_ANY_ANSWER = b"HTTP/1.1 "  # how every answer begins
_FIRST_PROBE_S = 0.1


class OneAtATime(HttpToolsProtocol):
    """uvicorn's connection, which hands the parser no more than the end of a request.

    What a client has sent ahead waits unparsed; when that is much, nothing more is read. A client that ends its side of
    the connection after a request gets its answer, unless the connection is TLS, which ends both sides together.
    Subclasses say in `refuse_incomplete` what becomes of a request that ends too soon.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ahead = bytearray()
        self._body_left = 0  # of a request that has told its length
        self._drops_upgrade = False
        self._has_ended = False  # the client's side
        self._turn: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.flow: _Flow = _Flow(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ahead.clear()
        super().connection_lost(exc)

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
        """The client has ended its side within a request."""
        self.transport.close()

    @property
    def is_answering(self) -> bool:
        """Whether a request has been handed to the application, and its answer is not complete."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    @property
    def is_within_request(self) -> bool:
        """Whether a request has begun to come in, and is not complete."""
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
        """Parse what has come, to the end of a request."""
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
            cost += _LEAST_COST if self._body_left else max(size, _LEAST_COST)
            piece = ahead[:size]
            del ahead[:size]
            self.feed(piece)
        if self.transport.is_closing():
            ahead.clear()
        elif self._has_ended and self._turn is None:
            self._answer_the_last()
        self.flow.hold(len(ahead) > _MOST_AHEAD)

    def _go_on(self) -> None:
        self._turn = None
        self._parse()

    def _may_parse(self) -> bool:
        return not (self.transport.is_closing() or (self.is_answering and not self.cycle.more_body))

    def _next_piece(self) -> int:
        """How many bytes are of one request for certain."""
        ahead = self._ahead
        if self._body_left:
            return min(len(ahead), self._body_left)
        end = ahead.find(_END_OF_HEAD, 0, _LONGEST_PIECE)
        if end >= 0:
            return end + len(_END_OF_HEAD)
        size = min(len(ahead), _LONGEST_PIECE)
        if self._has_ended:
            return size
        # The end may have come in part; its rest would bring the next request along.
        return size - next((n for n in (3, 2, 1) if ahead.endswith(_END_OF_HEAD[:n], 0, size)), 0)

    def _parse_without_upgrade(self) -> None:
        """Parse a head again without its wish for another protocol, for which the parser would leave out the body."""
        self._drops_upgrade = False
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.feed(b"\r\n".join(lines) + _END_OF_HEAD)

    def _answer_the_last(self) -> None:
        """Nothing more will come."""
        if self.is_within_request:
            self.refuse_incomplete()
        elif not self.is_answering:
            self.transport.close()
        elif not self.cycle.response_started and not isinstance(self.cycle.transport, _Probe):
            _Probe(self.cycle, self.loop)


class _ParseAgain(Exception):  # noqa: N818 - it is no error
    """Ends the parsing of a head that has to be parsed in another way."""


class _Flow(FlowControl):
    """Flow control that leaves the rest unread while a connection holds as much as it may, and after its end."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
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
    """A cycle's transport to a client that has ended its side, and may have left altogether.

    Both look alike until something is sent: who has left resets the connection. So what every answer begins with goes
    out before there is an answer, a byte at a time, as the answer to a byte is seen when the next one is sent.
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
        self._end()
        self._transport.write(data[self._sent :])

    def close(self) -> None:
        self._end()
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

    def _end(self) -> None:
        self._cycle.transport = self._transport
        if self._timer is not None:
            self._timer.cancel()
