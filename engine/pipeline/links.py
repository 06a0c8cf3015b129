"""Links: what one process of a pipeline tells the next, a message at a time, in order."""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import time
from collections.abc import Iterator
from struct import Struct
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

STEP: Final = 1
COPY_BLOCKS: Final = 2
COPY_STATES: Final = 3
FAILED: Final = 4
MASKS: Final = 5
DRAFT: Final = 6
DRAFT_HEAD: Final = 7
COPY_OF_DRAFT: Final = 8
DROP_ADAPTER: Final = 9

_STEP = Struct("<BHQQ")  # kind, slot, number of the step, bytes in the slot
_DRAFT = Struct("<d")  # behind that: the least probability
_COPY = Struct("<Bi")  # kind, cache group
_DROP = Struct("<Bq")  # kind, number of the adapter
MAX_BYTES: Final = 1 << 16
"""The longest message."""
_MAX_PAIRS = 4096


class Part(enum.Enum):
    """What of a step's slot goes with a message to a process that has no memory in common with the sender."""

    NOTHING = enum.auto()
    BATCH = enum.auto()
    ROWS = enum.auto()  # with the batch
    OUTPUT = enum.auto()  # and when each stage computed
    MASKS = enum.auto()
    ASKED = enum.auto()  # all that is said of draft tokens
    DRAFTED = enum.auto()


class Link(Protocol):
    """Links two processes: steps go one way, and drafts come back. Each end has one user, except for `close`."""

    def send(self, message: bytes, part: Part = Part.NOTHING) -> None:
        """Send a message and, if it is about a step, a part of the step's slot. Raises OSError if it has no reader."""
        ...

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, float | None]:
        """The next message; its part is in the receiver's slot then. Empty when the other end is closed.

        The second value is when it came (time.perf_counter); None if it came before, at an unknown time.
        Raises TimeoutError.
        """
        ...

    def close(self) -> None:
        """Close this end: the other one hears of it. From any thread."""
        ...


class LocalLink:
    """A link between processes of one machine that have their slots in common. A wait takes no processor time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._poll = end, select.poll()
        self._poll.register(end, select.POLLIN)

    def send(self, message: bytes, part: Part = Part.NOTHING) -> None:
        """See Link."""
        self._socket.send(message)

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, float | None]:
        """See Link."""
        must_wait = not self._poll.poll(0)
        if must_wait and not self._poll.poll(None if timeout_s is None else timeout_s * 1e3):
            raise TimeoutError
        arrived = time.perf_counter() if must_wait else None
        try:
            return self._socket.recv(MAX_BYTES), arrived
        except ConnectionResetError:
            return b"", arrived

    def close(self) -> None:
        """See Link."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone does not end a wait
        self._socket.close()


def new_link() -> tuple[socket.socket, socket.socket]:
    """Both ends of a local link."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def step_message(slot: int, number: int, size: int, kind: int = STEP) -> bytes:
    """Says that step `number` lies in a slot; or with MASKS, that its masks are written."""
    return _STEP.pack(kind, slot, number, size)


def read_step(message: bytes) -> tuple[int, int, int]:
    """Slot, number and size of a step."""
    _, slot, number, size = _STEP.unpack_from(message)
    return slot, number, size


def draft_message(kind: int, slot: int, size: int, min_probability: float) -> bytes:
    """Asks the draft model (DRAFT), or the layer for drafts (DRAFT_HEAD), for draft tokens: see DraftExecutor."""
    return step_message(slot, 0, size, kind) + _DRAFT.pack(min_probability)


def read_draft(message: bytes) -> float:
    """The least probability."""
    return float(_DRAFT.unpack_from(message, _STEP.size)[0])


def copy_messages(kind: int, pairs: NDArray[np.int32], group: int = 0) -> Iterator[bytes]:
    """Say that blocks of a cache group, also of a draft model, or slots of recurrent state, are to be copied,
    `pairs [N, 2]`.
    """
    for start in range(0, len(pairs), _MAX_PAIRS):
        yield _COPY.pack(kind, group) + np.ascontiguousarray(pairs[start : start + _MAX_PAIRS], np.int32).tobytes()


def read_copies(message: bytes) -> tuple[NDArray[np.int32], int]:
    """The pairs and the group."""
    _, group = _COPY.unpack_from(message)
    return np.frombuffer(message, np.int32, offset=_COPY.size).reshape(-1, 2), group


def drop_message(number: int) -> bytes:
    """Says that no step to come names this adapter."""
    return _DROP.pack(DROP_ADAPTER, number)


def read_drop(message: bytes) -> int:
    """The adapter's number."""
    return int(_DROP.unpack(message)[1])


def failed_message(text: str) -> bytes:
    """Says why a stage computes no more."""
    return bytes([FAILED]) + text.encode()[: MAX_BYTES - 8]


def read_failure(message: bytes) -> str:
    """The reason in a message of a failure."""
    return message[1:].decode(errors="replace")
