"""Forms with files: multipart/form-data, as RFC 7578 has it."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import bad_request

_MAX_PARTS = 16
_MAX_HEAD = 4096  # bytes of a part's headers
_BOUNDARY = re.compile(r'multipart/form-data\b.*?;\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb';\s*name="([^"]*)"', re.IGNORECASE)
_FILENAME = re.compile(rb';\s*filename="([^"]*)"', re.IGNORECASE)


class Part(NamedTuple):
    """A field of a form; `filename` is None for one that is no file."""

    filename: str | None
    content: bytes


def read_form(content_type: str, body: bytes | bytearray) -> dict[str, Part]:
    """The fields of a form by their names. Raises ApiError (400) for a body that is none."""
    boundary = _BOUNDARY.match(content_type)
    if boundary is None:
        raise bad_request("a file must be sent as multipart/form-data with a boundary", code="invalid_form")
    mark = b"--" + (boundary[1] or boundary[2]).encode("latin-1")
    if not body.startswith(mark):
        raise _broken()
    fields: dict[str, Part] = {}
    start = len(mark)
    while body[start : start + 2] != b"--":
        head_end = body.find(b"\r\n\r\n", start, start + _MAX_HEAD)
        end = body.find(b"\r\n" + mark, start if head_end < 0 else head_end + 2)
        if head_end < 0 or end < 0 or len(fields) >= _MAX_PARTS:
            raise _broken()
        head = bytes(body[start:head_end])
        name, filename = _NAME.search(head), _FILENAME.search(head)
        if name is None:
            raise _broken()
        shown = None if filename is None else filename[1].decode("utf-8", "replace")
        fields[name[1].decode("utf-8", "replace")] = Part(shown, bytes(body[head_end + 4 : end]))
        start = end + 2 + len(mark)
    return fields


def _broken() -> Exception:
    return bad_request(f"the form cannot be read: it must have 1 to {_MAX_PARTS} whole parts", code="invalid_form")
