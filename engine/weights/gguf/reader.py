"""GGUF files as they lie on the disk: metadata, and tensors as views of the memory-mapped file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. Nothing is allocated or read by
a number from the file before that number is checked against what is left of the file.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import struct
import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidewheel import _native

from ...errors import ModelError
from ...files.copies import FileCopy
from ...files.reading import MAX_TOKENIZER_BYTES, require_file
from ...files.wording import in_bytes, shown
from ..block_types import BLOCK_TYPES, OTHER_TYPES, BlockType
from .choosing import MAGIC

_OLDER_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg")  # GGML, GGMF, GGJT and GGLA, of 2023
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_MAX_DIMS, _MAX_ELEMENT_BITS = 4, 48
# Several times what the largest known models need. All of it is read, most of it for the tokenizer.
_MAX_METADATA_BYTES = MAX_TOKENIZER_BYTES
_MAX_KEYS, MAX_TENSORS, _MAX_STRINGS = 1 << 16, 1 << 18, 1 << 21
# An adapter has no tokenizer, and the matrices of all experts of a layer in one tensor.
_ADAPTER_METADATA_BYTES, _ADAPTER_TENSORS = 4 << 20, 1 << 14
_MOST_REMEMBERED, _SETTLED_NS = 256, 10**9  # files; nanoseconds
_MAX_NAME = 1 << 10  # bytes of a key or a tensor's name
_MIN_KEY, _MIN_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8  # bytes

_SEPARATOR, _SPACE = b"\0 "  # the first is of strings that are looked at together

Metadata = dict[str, Any]


class GgufStrings:
    """An array of strings. At most their lengths have been read: vocabularies have hundreds of thousands.

    `data` are the array's bytes, each string after its length. String i ends before byte `ends[i]`; None leaves that
    until it is needed.
    """

    def __init__(self, path: Path, key: str, data: bytes, count: int, ends: array[int] | None = None) -> None:
        self._path, self._key, self._data, self._count = path, key, data, count
        if ends is not None:
            self._ends = ends

    @functools.cached_property
    def _ends(self) -> array[int]:
        ends = _string_ends(self._data, 0, self._count)
        if ends is None or (ends[-1] if ends else 0) != len(self._data):
            raise ModelError(f"{self._path} has been changed while it was read")
        return ends

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"an array of {len(self)} strings"

    def to_list(self) -> list[str]:
        """All of them. Raises ModelError, naming the file and the key, if one is not UTF-8."""
        # As one text, which takes a third of the time: strings that have the separator in them are rare.
        try:
            texts = str(self._separated(_SEPARATOR), "utf-8").split(chr(_SEPARATOR))
        except UnicodeDecodeError:
            texts = []  # to say which
        return texts[1:] if len(texts) == len(self) + 1 else self._one_by_one()

    def to_pairs(self) -> list[tuple[str, str]] | None:
        """What stands before and after the one space in each; None if one has not one space. Raises as `to_list`."""
        data = self._separated(_SEPARATOR)
        found = np.frombuffer(data, np.uint8)
        marks = found[(found == _SEPARATOR) | (found == _SPACE)]
        if bytes(marks) == bytes((_SEPARATOR, _SPACE)) * len(self):
            with contextlib.suppress(UnicodeDecodeError):
                halves = str(data, "utf-8").replace(chr(_SEPARATOR), " ").split(" ")[1:]
                return list(zip(halves[::2], halves[1::2], strict=True))
        texts = self.to_list()
        if any(text.count(" ") != 1 for text in texts):
            return None
        return [(before, after) for before, after in (text.split(" ") for text in texts)]

    def _separated(self, separator: int) -> bytes:
        """The strings, with this byte before each in the place of its length."""
        data = np.frombuffer(self._data, np.uint8).copy()
        is_kept = np.ones(len(data), np.bool_)
        starts = np.zeros(len(self), np.int64)
        starts[1:] = self._ends[:-1]
        for byte in range(7):
            is_kept[starts + byte] = False
        data[starts + 7] = separator
        return data[is_kept].tobytes()

    def _one_by_one(self) -> list[str]:
        data, start, texts = self._data, 8, []
        try:
            for end in self._ends:
                texts.append(str(data[start:end], "utf-8"))
                start = end + 8
        except UnicodeDecodeError as error:
            raise ModelError(
                f"{self._path} is not a GGUF file that can be read: string {len(texts)} in key {shown(self._key)} is "
                "not UTF-8"
            ) from error
        return texts

    def find(self, text: str) -> int | None:
        """The index of the first that is `text`; None if there is none."""
        encoded = text.encode()
        wanted = len(encoded).to_bytes(8, "little") + encoded
        at = self._data.find(wanted)
        while at >= 0:
            # Bytes within a string may look like another string.
            index = bisect_left(self._ends, at + len(wanted))
            if self._ends[index] == at + len(wanted) and at == (self._ends[index - 1] if index else 0):
                return index
            at = self._data.find(wanted, at + 1)
        return None


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor. `shape` has the rows first, as in numpy; `data` are its bytes, a read-only view of the mapped file."""

    path: Path
    version: tuple[str, int, int, int]  # of the file: its path, bytes, last change of content and of inode in ns
    name: str
    kind: BlockType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    start: int

    @property
    def place(self) -> tuple[Any, ...]:
        """An identity of its content, without reading it."""
        return (*self.version, self.start, self.kind.name, self.shape)

    @property
    def origin(self) -> str:
        """For errors."""
        return f"{self.path}: tensor {self.name}"

    def at(self, index: int) -> GgufTensor:
        """One of the first dimension, of a tensor that has more than one: its blocks follow each other."""
        size = len(self.data) // self.shape[0]
        data, start = self.data[index * size : (index + 1) * size], self.start + index * size
        return replace(self, shape=self.shape[1:], data=data, start=start)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file's metadata, and its tensors by name.

    A value of the metadata is a bool, int, float or str, GgufStrings, or an array of numbers or of bools.
    """

    path: Path
    metadata: Metadata
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Opens a file. Raises ModelError, naming the file, if it is not GGUF, is truncated or contradicts itself."""
    content, status = _mapped(path)
    return _parsed(path, content, (str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns))


def _mapped(path: Path) -> tuple[bytes | mmap.mmap, os.stat_result]:
    require_file(path)
    try:
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else b"", status
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def raw_metadata(path: Path) -> dict[str, bytes]:
    """Each key's value as the file has it: the number of its type, and what follows. Raises as `read_gguf`."""
    require_file(path)
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        cursor = _Cursor(path, content, _MAX_METADATA_BYTES)
        _, num_keys = _header(cursor, MAX_TENSORS)
        raw: dict[str, bytes] = {}
        for _ in range(num_keys):
            key, start = cursor.text("a key", _MAX_NAME), cursor.at
            _value(cursor, cursor.u32("a key's type"), key)
            raw[key] = content[start : cursor.at]
        return raw


def first_metadata(path: Path) -> Metadata:
    """The metadata before the first key of the tokenizer, whose keys take nearly all of the time.

    Keys behind that are left out. Raises ModelError as `read_gguf`, for what is read alone.
    """
    return first_metadata_in(_mapped(path)[0], path)


def first_metadata_in(content: bytes | mmap.mmap, path: Path) -> Metadata:
    """The same of what a file begins with."""
    cursor = _Cursor(path, content, _MAX_METADATA_BYTES)
    _, num_keys = _header(cursor, MAX_TENSORS)
    return _metadata(cursor, num_keys, before="tokenizer.")


def read_gguf_copy(path: Path) -> GgufFile:
    """Like `read_gguf`, but of a copy in memory, for an adapter that may be written meanwhile. Raises ModelError."""
    copy = FileCopy(path)
    return _parsed(path, copy.content, copy.version, _ADAPTER_METADATA_BYTES, _ADAPTER_TENSORS)


def _parsed(
    path: Path,
    content: bytes | mmap.mmap,
    version: tuple[str, int, int, int],
    max_metadata: int = _MAX_METADATA_BYTES,
    max_tensors: int = MAX_TENSORS,
) -> GgufFile:
    # A file that was just written may be written again without another time.
    is_settled = time.time_ns() - version[3] > _SETTLED_NS
    cursor = _Cursor(path, content, max_metadata, _string_sizes(version) if is_settled else None)
    num_tensors, num_keys = _header(cursor, max_tensors)
    metadata = _metadata(cursor, num_keys)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment must be a power of two, got {shown(alignment)}")
    return GgufFile(path, metadata, _tensors(cursor, num_tensors, alignment, version))


class _Cursor:
    """Reads the metadata front to back. Every read is checked against the end first.

    `sizes` are the bytes of arrays of strings, by their keys, which were found before.
    """

    def __init__(
        self, path: Path, content: bytes | mmap.mmap, max_bytes: int, sizes: dict[str, int] | None = None
    ) -> None:
        self.path, self.content, self.at = path, content, 0
        self.sizes = {} if sizes is None else sizes
        self._end = min(len(content), max_bytes)

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is not a GGUF file that can be read: {what}")

    @property
    def left(self) -> int:
        return self._end - self.at

    def advance(self, count: int, what: str) -> int:
        """Where the next `count` bytes begin."""
        if count > self.left:
            if self._end < len(self.content):
                raise self.error(f"its metadata takes more than {self._end >> 20} MiB")
            raise self.error(f"it ends within {what}, it may be truncated")
        start = self.at
        self.at += count
        return start

    def u32(self, what: str) -> int:
        value: int = struct.unpack_from("<I", self.content, self.advance(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = struct.unpack_from("<Q", self.content, self.advance(8, what))[0]
        return value

    def count(self, what: str, min_bytes: int, most: int) -> int:
        """A number of things that take at least `min_bytes` bytes each."""
        value = self.u64(what)
        if value > most:
            raise self.error(f"it says that there are more than {most} {what}, which is more than any model has")
        if value * min_bytes > self.left:
            self.advance(value * min_bytes, what)
        return value

    def text(self, what: str, most: int = _MAX_METADATA_BYTES) -> str:
        length = self.u64(what)
        if length > most:
            raise self.error(f"it says that {what} has more than {in_bytes(most)}, which is longer than in any model")
        start = self.advance(length, what)
        try:
            return str(self.content[start : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8") from error


def _header(cursor: _Cursor, max_tensors: int) -> tuple[int, int]:
    if cursor.content[:4] in _OLDER_MAGICS:
        raise ModelError(f"{cursor.path} is in a format that was before GGUF: convert the original model again")
    if cursor.content[:4] != MAGIC:
        raise ModelError(f"{cursor.path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    cursor.advance(4, "its header")
    version = cursor.u32("its header")
    if version not in _VERSIONS:
        if version & 0xFFFF == 0 and version:
            raise cursor.error(
                "it is big-endian; only little-endian files are supported; convert it with gguf-convert-endian of "
                "the gguf package"
            )
        raise cursor.error(f"it has version {version}; supported are 2 and 3: convert the original model again")
    num_tensors = cursor.count("tensors", 0, max_tensors)
    num_keys = cursor.count("keys", _MIN_KEY, _MAX_KEYS)
    return num_tensors, num_keys


def _metadata(cursor: _Cursor, count: int, before: str | None = None) -> Metadata:
    metadata: Metadata = {}
    for _ in range(count):
        key = cursor.text("a key", _MAX_NAME)
        if before is not None and key.startswith(before):
            break
        if key in metadata:
            raise cursor.error(f"key {shown(key)} occurs twice")
        metadata[key] = _value(cursor, cursor.u32("a key's type"), key)
    return metadata


def _value(cursor: _Cursor, kind: int, key: str) -> object:
    where = f"key {shown(key)}"
    if kind == _STRING:
        return cursor.text(where)
    if kind in _NUMBERS:
        return _numbers(cursor, kind, 1, where)[0].item()
    if kind != _ARRAY:
        raise cursor.error(f"{where} has type {kind}, which is not known")
    kind = cursor.u32(where)
    if kind == _STRING:
        return _strings(cursor, cursor.count(f"strings in {where}", 8, _MAX_STRINGS), key, where)
    if kind in _NUMBERS:
        size = np.dtype(_NUMBERS[kind]).itemsize
        return _numbers(cursor, kind, cursor.count(f"numbers in {where}", size, _MAX_METADATA_BYTES), where)
    if kind == _ARRAY:
        raise cursor.error(f"{where} is an array of arrays, which is not supported")
    raise cursor.error(f"{where} is an array of type {kind}, which is not known")


def _strings(cursor: _Cursor, count: int, key: str, where: str) -> GgufStrings:
    content, begin, size, ends = cursor.content, cursor.at, cursor.sizes.get(key), None
    if size is None:
        ends = _string_ends(content, begin, count)
        size = cursor.left + 1 if ends is None else ends[-1] if ends else 0
    cursor.advance(size, where)
    cursor.sizes[key] = size
    return GgufStrings(cursor.path, key, content[begin : begin + size], count, ends)


def _string_ends(content: bytes | mmap.mmap, begin: int, count: int) -> array[int] | None:
    """How far behind `begin` each string ends; None if they do not all end within the content."""
    ends = array("Q", bytes(8 * count))
    if not count:
        return ends
    found = _native.string_ends(np.frombuffer(content, np.uint8), begin, np.frombuffer(ends, np.uint64))
    return ends if found else None


@functools.lru_cache(_MOST_REMEMBERED)
def _string_sizes(version: tuple[str, int, int, int]) -> dict[str, int]:
    """The bytes of a file's arrays of strings by their keys, as far as they were read.

    To find them takes most of the time of reading a file with a large vocabulary. A server of several models reads it
    at each load, but needs the strings only for the first one.
    """
    return {}


def _numbers(cursor: _Cursor, kind: int, count: int, where: str) -> NDArray[np.generic]:
    dtype = np.dtype(_NUMBERS[kind])
    start = cursor.advance(count * dtype.itemsize, where)
    # A copy, so that a tokenizer does not keep the file mapped.
    numbers = np.frombuffer(cursor.content, dtype, count, start).copy() if count else np.empty(0, dtype)
    if kind != _BOOL:
        return numbers
    if count and numbers.max() > 1:
        raise cursor.error(f"{where} has a bool that is neither 0 nor 1")
    return numbers.astype(np.bool_)


def _tensors(cursor: _Cursor, count: int, alignment: int, version: tuple[str, int, int, int]) -> dict[str, GgufTensor]:
    if count * _MIN_TENSOR > cursor.left:
        cursor.advance(count * _MIN_TENSOR, "the list of tensors")
    listed: dict[str, tuple[BlockType, tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.text("a tensor's name", _MAX_NAME)
        if name in listed:
            raise cursor.error(f"tensor {shown(name)} occurs twice")
        listed[name] = _tensor(cursor, name, alignment)
    begin = -(-cursor.at // alignment) * alignment
    size, end, before = len(cursor.content), 0, ""
    for name, (_, _, offset, num_bytes) in sorted(listed.items(), key=lambda entry: entry[1][2:]):
        if offset < end:
            raise cursor.error(f"tensors {shown(before)} and {shown(name)} overlap")
        end, before = offset + num_bytes, name
        if begin + end > size:
            raise cursor.error(
                f"tensor {shown(name)} ends {in_bytes(begin + end - size)} past its end, it may be truncated"
            )
    content = np.frombuffer(cursor.content, np.uint8) if size else np.empty(0, np.uint8)
    return {
        name: GgufTensor(
            cursor.path,
            version,
            name,
            kind,
            shape,
            content[begin + offset : begin + offset + num_bytes],
            begin + offset,
        )
        for name, (kind, shape, offset, num_bytes) in listed.items()
    }


def _tensor(cursor: _Cursor, name: str, alignment: int) -> tuple[BlockType, tuple[int, ...], int, int]:
    """Its type, its shape, where it begins after the metadata, and its bytes."""
    where = f"tensor {shown(name)}"
    num_dims = cursor.u32(where)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.error(f"{where} has {num_dims} dimensions; there may be 1 to {_MAX_DIMS}")
    shape = tuple(cursor.u64(where) for _ in range(num_dims))[::-1]
    number, offset = cursor.u32(where), cursor.u64(where)
    if number not in BLOCK_TYPES:
        kind = OTHER_TYPES.get(number, f"type {number}")
        supported = ", ".join(known.name for known in BLOCK_TYPES.values())
        raise ModelError(
            f"{cursor.path}: {where} is stored as {kind}, which is not supported; supported are {supported}. "
            "Take another quantization of the model"
        )
    block = BLOCK_TYPES[number]
    elements = math.prod(shape)
    if not elements:
        raise cursor.error(f"{where} has no elements")
    if elements >= 1 << _MAX_ELEMENT_BITS:
        raise cursor.error(f"{where} has 2^{_MAX_ELEMENT_BITS} elements or more, which is more than any model has")
    if shape[-1] % block.elements:
        raise cursor.error(f"{where} has rows of {shape[-1]} elements, but {block.name} has blocks of {block.elements}")
    if offset % alignment:
        raise cursor.error(f"{where} begins at byte {offset}, which is not a multiple of {alignment}")
    return block, shape, offset, elements // block.elements * block.bytes
