"""The header of a safetensors file that a client has named, read a tensor at a time.

`json.loads` and the safetensors library hold the interpreter's lock until they have read a whole header. For 4 MB that
takes a quarter of a second, and no stream goes on meanwhile. The garbage collector then takes as long on the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from json import JSONDecoder
from typing import Any

MAX_HEADER_BYTES = 8 << 20  # an adapter with matrices for each of 18,000 experts has less
_MAX_NAME, _MAX_ENTRY, _MAX_METADATA = 1 << 10, 4 << 10, 256 << 10  # characters
_METADATA = "__metadata__"
_BLANK = re.compile(r"[ \t\r\n]{0,16}")
_DECODER = JSONDecoder()


class TensorEntries(Mapping[str, Any]):
    """A header's entry of each tensor, by name. It is kept as text: the garbage collector does not look at texts."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def __getitem__(self, name: str) -> Any:
        return _DECODER.decode(self._texts[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


def tensors_in(header: bytes, max_tensors: int) -> TensorEntries:
    """A header's entry of each tensor. Raises ValueError if it is not a JSON object, has long parts, or more than
    `max_tensors` tensors.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"its header has more than the {MAX_HEADER_BYTES >> 20} MiB that an adapter may have")
    text = header.decode().rstrip()
    found: dict[str, str] = {}
    at = _after(text, 0, "{")
    if text[at : at + 1] == "}":
        at += 1
    else:
        while True:
            name, at = _name(text, at)
            end = _end(text, at, _MAX_METADATA if name == _METADATA else _MAX_ENTRY)
            if name in found:
                raise ValueError("its header names a tensor twice")
            if len(found) > max_tensors:  # the metadata may be among them
                raise ValueError(f"it has more than the {max_tensors} tensors that an adapter of this model may have")
            found[name] = text[at:end]
            at = _blank(text, end)
            if text[at : at + 1] != ",":
                break
            at = _blank(text, at + 1)
        at = _after(text, at, "}")
    if at != len(text):
        raise ValueError("there is something after its header")
    found.pop(_METADATA, None)
    return TensorEntries(found)


def _name(text: str, at: int) -> tuple[str, int]:
    if text[at : at + 1] != '"':
        raise ValueError("its header is not valid JSON")
    name, length = _DECODER.raw_decode(text[at : at + _MAX_NAME])
    return name, _after(text, _blank(text, at + length), ":")


def _end(text: str, at: int, most: int) -> int:
    """Where the value ends that begins there."""
    try:
        return at + _DECODER.raw_decode(text[at : at + most])[1]
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error


def _after(text: str, at: int, mark: str) -> int:
    if text[at : at + 1] != mark:
        raise ValueError("its header is not valid JSON")
    return _blank(text, at + 1)


def _blank(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    assert match is not None
    return match.end()
