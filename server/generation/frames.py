"""How answers are written as server-sent events: frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar, Generic, TypeVar

import msgspec

from ..errors import ApiError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


class Frames(ABC, Generic[T]):
    """Writes what a source pushes in the frames of a protocol; by default those of OpenAI begin and end a stream.

    `begin`, `frame` for each item, `end` and `done` are wanted in this order, and `failed` as the last one of a stream
    that breaks off. All may be empty.
    """

    done: ClassVar[bytes] = DONE

    def begin(self) -> bytes:
        """What comes before the first item."""
        return b""

    @abstractmethod
    def frame(self, item: T) -> bytes | Iterator[bytes]:
        """What an item becomes; an iterator if that is much, so that others have their turn between its frames."""

    def end(self) -> Iterable[bytes]:
        """What comes after the last item, with turns of others in between."""
        return ()

    def failed(self, error: ApiError) -> bytes:
        """How a stream breaks off that has begun."""
        return b"data: " + error.body() + b"\n\n" + DONE


def event(payload: msgspec.Struct) -> bytes:
    """One frame."""
    return b"data: " + encode_json(payload) + b"\n\n"


def around_text(payload: msgspec.Struct, field: str) -> tuple[bytes, bytes]:
    """What comes before and after the JSON of a text in the frame of `payload`, whose `field` is the empty text."""
    marker = b'"%b":""' % field.encode()
    before, found, after = event(payload).partition(marker)
    assert found, f"{field} is not empty"
    return before + marker[:-2], after


def named_event(payload: msgspec.Struct) -> bytes:
    """One frame of a protocol whose events have names: the payload's `type`, which is its struct's tag."""
    return b"event: %b\ndata: %b\n\n" % (str(payload.__struct_config__.tag).encode(), encode_json(payload))


def named_events(payloads: Iterable[msgspec.Struct]) -> bytes:
    """Their frames, one after the other; each is encoded before the next one is asked for."""
    return b"".join(map(named_event, payloads))
