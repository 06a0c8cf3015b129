"""Forms with files: multipart/form-data, as RFC 7578 has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import parse_options_header

from ..errors import bad_request

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MAX_PARTS = 16
_MAX_HEAD = 4096  # bytes of a part's headers
_MAX_BOUNDARY = 70  # characters, as RFC 2046 has it
_PIECE = 2**16  # bytes that are parsed together


class Part(NamedTuple):
    """A field of a form; `filename` is None for one that is no file."""

    filename: str | None
    content: bytes


def read_form(content_type: str, body: bytes | bytearray) -> dict[str, Part]:
    """The fields of a form by their names. Raises ApiError (400) for a body that is none."""
    kind, options = parse_options_header(content_type.encode("latin-1", "replace"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise bad_request("a file must be sent as multipart/form-data with a boundary", code="invalid_form")
    form = _Form()
    callbacks: MultipartCallbacks = {
        "on_part_begin": form.begin,
        "on_header_field": form.add_to_field,
        "on_header_value": form.add_to_value,
        "on_header_end": form.end_header,
        "on_part_data": form.add_content,
        "on_part_end": form.end,
        "on_end": form.end_all,
    }
    try:
        parser = MultipartParser(boundary, callbacks)
        for start in range(0, len(body), _PIECE):
            parser.write(bytes(body[start : start + _PIECE]))
        parser.finalize()
    except (MultipartParseError, _BrokenError):
        raise _broken() from None
    if not form.is_complete:
        raise _broken()
    return form.fields


class _BrokenError(Exception):
    """A form of too many parts, or a part without a name."""


class _Form:
    """What the parser has found so far."""

    def __init__(self) -> None:
        self.fields: dict[str, Part] = {}
        self.is_complete = False
        self._num_parts = 0
        self.begin_head()

    def begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise _BrokenError
        self.begin_head()

    def begin_head(self) -> None:
        self._field, self._value, self._content = bytearray(), bytearray(), bytearray()
        self._disposition = b""
        self._head_bytes = 0

    def add_to_field(self, data: bytes, start: int, end: int) -> None:
        self._count_head(end - start)
        self._field += data[start:end]

    def add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._count_head(end - start)
        self._value += data[start:end]

    def end_header(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def add_content(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]

    def end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name, filename = options.get(b"name"), options.get(b"filename")
        if name is None:
            raise _BrokenError
        shown = None if filename is None else filename.decode("utf-8", "replace")
        self.fields[name.decode("utf-8", "replace")] = Part(shown, bytes(self._content))

    def end_all(self) -> None:
        self.is_complete = True

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > _MAX_HEAD:
            raise _BrokenError


def _broken() -> Exception:
    return bad_request(f"the form cannot be read: it must have 1 to {_MAX_PARTS} whole parts", code="invalid_form")
