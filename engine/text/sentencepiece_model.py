"""SentencePieceModel: what a `tokenizer.model` says, read without its library.

The fields: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto, in the wire format of
https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..files.reading import MAX_TOKENIZER_BYTES, read_file

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

MAX_PIECES = 1 << 20  # several times the largest vocabulary that there is
MAX_CHARACTERS = 1 << 22  # of all pieces
MAX_PIECE_CHARACTERS = 1024

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_MAX_PIECE_FIELDS, _MAX_FIELDS = 16, 1 << 21
_float = struct.Struct("<f").unpack_from


@dataclass
class SentencePieceModel:
    """Pieces with their scores and kinds, and how texts are split into them and normalized before."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    whitespace_is_suffix: bool = False
    bos_piece: str = "<s>"
    eos_piece: str = "</s>"
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    denormalizes: bool = False

    @property
    def unknown(self) -> int:
        """The id of the unknown piece. There is exactly one."""
        return self.kinds.index(UNKNOWN)

    def of_kind(self, kind: int) -> list[str]:
        """The pieces of a kind, in the order of their ids."""
        return [piece for piece, own in zip(self.pieces, self.kinds, strict=True) if own == kind]

    def control(self, piece: str) -> str | None:
        """The piece itself, if there is such a one that marks structure."""
        return piece if piece in self.of_kind(CONTROL) else None


class _MalformedError(ValueError):
    pass


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """The model in a file. Raises ModelError for one that the library would not load, or that is too large."""
    data = read_file(path, MAX_TOKENIZER_BYTES)
    try:
        model = _model(data)
        check(model)
    except ValueError as error:  # also of texts that are not UTF-8
        raise ModelError(f"{path} is not a sentencepiece model: {error}") from error
    return model


def _model(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    parts: dict[int, Callable[[int, int], None]] = {
        1: lambda start, end: _add_piece(model, data, start, end),
        2: lambda start, end: _set(model, data, start, end, _TRAINER),
        3: lambda start, end: _set(model, data, start, end, _NORMALIZER),
        5: lambda start, end: _set(model, data, start, end, _DENORMALIZER),
    }
    for number, kind, value, end in _fields(data, 0, len(data), MAX_PIECES + _MAX_FIELDS):
        if kind == _BYTES and number in parts:
            parts[number](value, end)
    return model


def _add_piece(model: SentencePieceModel, data: bytes, start: int, end: int) -> None:
    if len(model.pieces) == MAX_PIECES:
        raise _MalformedError(f"it has more than {MAX_PIECES} pieces")
    piece, score, kind = _usual_piece(data, start, end) or _piece(data, start, end)
    model.pieces.append(piece)
    model.scores.append(score)
    model.kinds.append(kind)


def _usual_piece(data: bytes, start: int, end: int) -> tuple[str, float, int] | None:
    """A short text, a score and maybe a kind, as nearly all are, which takes a third of the time of `_piece`."""
    if end - start < 7 or data[start] != 0x0A or (text_end := start + 2 + data[start + 1]) > end - 5:
        return None
    if data[start + 1] > 127 or data[text_end] != 0x15:
        return None
    if end == text_end + 5:
        kind = NORMAL
    elif end != text_end + 7 or data[text_end + 5] != 0x18 or (kind := data[text_end + 6]) > 127:
        return None
    return data[start + 2 : text_end].decode(), _float(data, text_end + 1)[0], kind


def _piece(data: bytes, start: int, end: int) -> tuple[str, float, int]:
    piece, score, kind = "", 0.0, NORMAL
    for number, wire, value, stop in _fields(data, start, end, _MAX_PIECE_FIELDS):
        if number == 1 and wire == _BYTES:
            piece = data[value:stop].decode()
        elif number == 2 and wire == _FOUR_BYTES:
            score = _float(data, value)[0]
        elif number == 3 and wire == _VARINT:
            kind = value
    return piece, score, kind


_TRAINER = {3: "model_type", 24: "whitespace_is_suffix", 35: "byte_fallback", 46: "bos_piece", 47: "eos_piece"}
_NORMALIZER = {2: "charsmap", 3: "add_dummy_prefix", 4: "remove_extra_whitespaces", 5: "escape_whitespaces"}
_DENORMALIZER = {2: "denormalizes"}


def _set(model: SentencePieceModel, data: bytes, start: int, end: int, names: dict[int, str]) -> None:
    for number, wire, value, stop in _fields(data, start, end, _MAX_FIELDS):
        if (name := names.get(number)) is None:
            continue
        of_type = type(getattr(model, name))
        given: Any = data[value:stop] if wire == _BYTES else value
        if of_type is str and wire == _BYTES:
            given = given.decode()
        elif wire != (_BYTES if of_type is bytes or name == "denormalizes" else _VARINT):
            continue  # as the library does with a field of another type
        setattr(model, name, of_type(given))


def _fields(data: bytes, start: int, end: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, wire type, and a number, or where bytes begin and end.

    Raises ValueError for more than `most`, and for what is no message.
    """
    for _ in range(most):
        if start == end:
            return
        tag, start = _varint(data, start, end)
        wire = tag & 7
        if wire == _VARINT:
            value, start = _varint(data, start, end)
            yield tag >> 3, wire, value, start
            continue
        if wire == _BYTES:
            length, start = _varint(data, start, end)
        elif wire in (_FOUR_BYTES, _EIGHT_BYTES):
            length = 4 if wire == _FOUR_BYTES else 8
        else:
            raise _MalformedError(f"it has a field of type {wire}")
        if length > end - start:
            raise _MalformedError("a field is longer than the message that contains it")
        yield tag >> 3, wire, start, start + length
        start += length
    if start != end:
        raise _MalformedError(f"a part of it has more than {most} fields")


def _varint(data: bytes, start: int, end: int) -> tuple[int, int]:
    if start < end and (byte := data[start]) < 128:
        return byte, start + 1
    value = 0
    for i in range(min(_MAX_VARINT_BYTES, end - start)):
        byte = data[start + i]
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, start + i + 1
    raise _MalformedError("it ends within a number")


def check(model: SentencePieceModel) -> None:
    """Raises ValueError for pieces that the library would not take, and for those that are too large."""
    pieces, kinds = model.pieces, model.kinds
    if not pieces:
        raise _MalformedError("it has no pieces")
    if not all(pieces):
        raise _MalformedError("a piece is empty")
    if len(set(pieces)) < len(pieces):
        raise _MalformedError("a piece occurs twice")
    if not {*kinds} <= {*range(NORMAL, BYTE + 1)}:
        raise _MalformedError(f"kinds of pieces are numbers from {NORMAL} to {BYTE}")
    if kinds.count(UNKNOWN) != 1:
        raise _MalformedError(f"it has {kinds.count(UNKNOWN)} unknown pieces, not one")
    if max(map(len, pieces)) > MAX_PIECE_CHARACTERS or sum(map(len, pieces)) > MAX_CHARACTERS:
        raise _MalformedError(
            f"its pieces may have {MAX_PIECE_CHARACTERS} characters each and {MAX_CHARACTERS} together"
        )
    wanted = {f"<0x{byte:02X}>" for byte in range(256)} if model.byte_fallback else set()
    if {*model.of_kind(BYTE)} != wanted:
        raise _MalformedError(f"its pieces of bytes must be {'<0x00> to <0xFF>' if wanted else 'none'}")
