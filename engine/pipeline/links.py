"""Links: what one process of a pipeline tells the next, a message at a time, in order."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

STEP: Final = 1
COPY_BLOCKS: Final = 2
COPY_STATES: Final = 3
FAILED: Final = 4

_STEP = Struct("<BHQQ")  # kind, slot, number of the step, bytes in the slot
_COPY = Struct("<Bi")  # kind, cache group
_MOST_BYTES = 1 << 16
_MOST_PAIRS = 4096


def new_link() -> tuple[socket.socket, socket.socket]:
    """Both ends of a link. A wait takes no processor time, and ends when the other end is closed."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def receive(link: socket.socket) -> bytes:
    """The next message; empty when the other end is closed."""
    try:
        return link.recv(_MOST_BYTES)
    except ConnectionResetError:
        return b""


def step_message(slot: int, number: int, size: int) -> bytes:
    """Says that step `number` lies in a slot."""
    return _STEP.pack(STEP, slot, number, size)


def read_step(message: bytes) -> tuple[int, int, int]:
    """Slot, number and size of a step."""
    _, slot, number, size = _STEP.unpack(message)
    return slot, number, size


def copy_messages(kind: int, pairs: NDArray[np.int32], group: int = 0) -> Iterator[bytes]:
    """Say that blocks of a cache group, or slots of recurrent state, are to be copied, `pairs [N, 2]`."""
    for start in range(0, len(pairs), _MOST_PAIRS):
        yield _COPY.pack(kind, group) + np.ascontiguousarray(pairs[start : start + _MOST_PAIRS], np.int32).tobytes()


def read_copies(message: bytes) -> tuple[NDArray[np.int32], int]:
    """The pairs and the group."""
    _, group = _COPY.unpack_from(message)
    return np.frombuffer(message, np.int32, offset=_COPY.size).reshape(-1, 2), group


def failed_message(text: str) -> bytes:
    """Says why a stage computes no more."""
    return bytes([FAILED]) + text.encode()[: _MOST_BYTES - 8]


def read_failure(message: bytes) -> str:
    """That reason."""
    return message[1:].decode(errors="replace")
