"""TcpLink: a link between processes that may be on different machines. What a step needs travels with its message.

Only the processes of one pipeline may connect: a new connection has to show a token first. The token is not secret from
those who can read the network.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from struct import Struct
from typing import Final

from .links import MAX_BYTES, Part, read_step
from .step_slot import StepSlot

TOKEN_BYTES: Final = 32
STEPS: Final = b"s"
"""What a connection is for: steps come on it."""
RESULTS: Final = b"r"
"""The last stage's: masks come on it, and results go back."""

_HEAD = Struct("<IB")  # bytes of the message, spans of the slot behind it
_SPAN = Struct("<QQ")  # where they begin and end
_HANDSHAKE_S = 10.0
_MAX_UNKNOWN = 16  # who have connected and not shown the token; the oldest of them makes room for another
_SILENT_S = 15  # after which a machine that does not answer is gone


class TcpLink:
    """Both directions of a connection; see Link. Slots are this process's own.

    A thread takes in what comes, also while the process computes. So senders do not wait, and a step is there when the
    one before it has been computed.
    """

    def __init__(self, connection: socket.socket, slots: Sequence[StepSlot]) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {socket.TCP_KEEPINTVL: _SILENT_S // 3, socket.TCP_KEEPCNT: 2}
        if sys.platform == "darwin":  # it does not limit how long sent bytes may stay unacknowledged
            options[socket.TCP_KEEPALIVE] = _SILENT_S // 3
        else:
            options |= {socket.TCP_KEEPIDLE: _SILENT_S // 3, socket.TCP_USER_TIMEOUT: _SILENT_S * 1000}
        for option, value in options.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket, self._slots = connection, slots
        self._arrived: queue.SimpleQueue[tuple[bytes, float]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="link", daemon=True)
        self._reader.start()

    def send(self, message: bytes, part: Part = Part.NOTHING) -> None:
        """See Link."""
        views: list[memoryview] = []
        spans: list[tuple[int, int]] = []
        if part is not Part.NOTHING:
            index, _, size = read_step(message)
            slot = self._slots[index]
            spans, memory = slot.spans(part, size), slot.memory(size)
            views = [memory[begin:end] for begin, end in spans]
        head = _HEAD.pack(len(message), len(spans)) + b"".join(_SPAN.pack(*span) for span in spans) + message
        views.insert(0, memoryview(head))
        while views:
            sent = self._socket.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, float | None]:
        """See Link."""
        try:
            message, arrived = self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if not message:
            self._arrived.put((message, arrived))  # it stays closed
        return message, arrived

    def close(self) -> None:
        """See Link."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError, OverflowError, struct.error):
            while True:
                message_bytes, num_spans = _HEAD.unpack(self._exactly(_HEAD.size))
                if message_bytes > MAX_BYTES:
                    raise ValueError("a message that is too long")
                spans = [_SPAN.unpack(self._exactly(_SPAN.size)) for _ in range(num_spans)]
                message = self._exactly(message_bytes)
                if spans:
                    index, _, size = read_step(message)
                    memory = self._slots[index].memory(size)
                    for begin, end in spans:
                        if not begin <= end <= size:
                            raise ValueError("a span that is not in its slot")
                        self._fill(memory[begin:end])
                self._arrived.put((message, time.perf_counter()))
        self._arrived.put((b"", time.perf_counter()))

    def _exactly(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError
            view = view[count:]


def connect(address: tuple[str, int], token: bytes, purpose: bytes) -> socket.socket:
    """A connection to a process that listens. Raises OSError."""
    connection = socket.create_connection(address, _HANDSHAKE_S)
    try:
        connection.sendall(token + purpose)
    except BaseException:
        connection.close()
        raise
    return connection


def accept(listener: socket.socket, token: bytes, purposes: set[bytes], timeout_s: float) -> dict[bytes, socket.socket]:
    """A connection for each purpose, with the token; other connections are closed. Raises TimeoutError.

    All connections are read at the same time, so a silent one keeps no other waiting. `listener` does not block
    afterwards.
    """
    found: dict[bytes, socket.socket] = {}
    deadline = time.monotonic() + timeout_s
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        unknown: dict[socket.socket, _Handshake] = {}  # oldest first

        def leave(connection: socket.socket) -> None:
            selector.unregister(connection)
            del unknown[connection]

        try:
            while found.keys() != purposes:
                now = time.monotonic()
                if now >= deadline:
                    raise TimeoutError(f"not all of {len(purposes)} connections came within {timeout_s:g} s")
                for connection in [known for known, handshake in unknown.items() if handshake.deadline <= now]:
                    leave(connection)
                    connection.close()
                next_s = min([deadline, *(handshake.deadline for handshake in unknown.values())]) - now
                ready = {key.fileobj for key, _ in selector.select(next_s)}
                for connection in [known for known in unknown if known in ready]:
                    handshake = unknown[connection]
                    if handshake.read(connection):
                        leave(connection)
                        purpose = handshake.purpose(token)
                        if purpose in purposes - found.keys():
                            found[purpose] = connection
                        else:
                            connection.close()
                if listener in ready:
                    with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        if len(unknown) == _MAX_UNKNOWN:
                            oldest = next(iter(unknown))
                            leave(oldest)
                            oldest.close()
                        unknown[connection] = _Handshake(time.monotonic() + _HANDSHAKE_S)
                        selector.register(connection, selectors.EVENT_READ)
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        finally:
            for connection in unknown:
                connection.close()
    return found


class _Handshake:
    """What has come on a new connection so far."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._said = b""

    def read(self, connection: socket.socket) -> bool:
        """Take what has come. Whether nothing more will: what is behind the handshake is left to the link."""
        try:
            more = connection.recv(TOKEN_BYTES + 1 - len(self._said))
        except BlockingIOError:
            return False
        except OSError:
            return True
        self._said += more
        return not more or len(self._said) == TOKEN_BYTES + 1

    def purpose(self, token: bytes) -> bytes:
        """What someone who shows the token wants; nothing for others."""
        shown, purpose = self._said[:TOKEN_BYTES], self._said[TOKEN_BYTES:]
        return purpose if hmac.compare_digest(shown, token) else b""
