"""Structs as server-sent events."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


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
