"""Clients in a closed loop: each streams one completion after another, all from one light thread.

Client and server often share a machine. So bytes are only kept as they come, with their times, and parsed at the end.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import h11
from measure import StreamError, StreamTimer

_NAP_S = 0.002  # several texts at a time: waking up for each would cost the server's processor more than the text
_RECEIVED_BYTES = 2**16


class Stream:
    """One streamed completion over its own connection, from its construction on."""

    def __init__(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        payload = json.dumps(body).encode()
        fields = {
            "host": parts.netloc,
            "content-type": "application/json",
            "content-length": str(len(payload)),
            "connection": "close",
            **headers,
        }
        self._connection = h11.Connection(h11.CLIENT)
        request = h11.Request(method="POST", target="/v1/completions", headers=list(fields.items()))
        message = [self._connection.send(event) for event in (request, h11.Data(payload), h11.EndOfMessage())]
        self._received: list[tuple[float, bytes]] = []
        self._started = time.perf_counter()
        self.socket = socket.create_connection((parts.hostname, parts.port or 80))
        self.socket.sendall(b"".join(part for part in message if part))

    def receive(self, now: float) -> bool:
        """Keep the bytes that have arrived; False at the end."""
        data = self.socket.recv(_RECEIVED_BYTES)
        self._received.append((now, data))
        return bool(data)

    def timer(self) -> StreamTimer:
        """The answer, read to its end. Raises StreamError if the server refused it or it is not complete."""
        timer = StreamTimer(self._started)
        status, refusal = 200, b""
        for now, event in self._events():
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data) and status == 200:
                timer.feed(bytes(event.data), now)
            elif isinstance(event, h11.Data):
                refusal += event.data
        if status != 200:
            raise StreamError(f"status {status}: {refusal.decode(errors='replace')[:300]}")
        timer.finish()
        return timer

    def _events(self) -> Iterator[tuple[float, h11.Event]]:
        for now, data in self._received:
            try:
                self._connection.receive_data(data)
                while isinstance(event := self._connection.next_event(), h11.Event):
                    yield now, event
                    if isinstance(event, h11.ConnectionClosed):
                        break
            except h11.RemoteProtocolError as error:
                raise StreamError(f"the answer is not complete: {error}") from error


def closed_loop(
    url: str, bodies: Sequence[Mapping[str, Any]], clients: int, headers: Mapping[str, str] | None = None
) -> list[StreamTimer]:
    """Send all requests in their order, `clients` at a time: who has read an answer to its end sends the next one.

    Raises StreamError for an answer that failed, and OSError for a server that cannot be reached.
    """
    waiting = iter(bodies)
    streams: list[Stream] = []
    with selectors.DefaultSelector() as selector:

        def send_next() -> None:
            if (body := next(waiting, None)) is not None:
                streams.append(Stream(url, body, headers or {}))
                selector.register(streams[-1].socket, selectors.EVENT_READ, streams[-1])

        try:
            for _ in range(clients):
                send_next()
            while selector.get_map():
                ready, now = selector.select(), time.perf_counter()
                for key, _ in ready:
                    if not key.data.receive(now):
                        selector.unregister(key.fileobj)
                        key.data.socket.close()
                        send_next()
                time.sleep(_NAP_S)
        finally:
            for stream in streams:
                stream.socket.close()
    return [stream.timer() for stream in streams]
