"""PyTorch's files of tensors (`pytorch_model.bin`), as memory-mapped views. Nothing in a file is run.

`torch.save` writes a zip archive: a pickle of the names and shapes, and beside it the bytes of each storage. A pickle
is a program for a stack machine that may call any function. The machine here knows the few instructions that such a
file needs and makes only dictionaries, numbers and texts, storages and tensors: other names are refused.

The format: https://docs.pytorch.org/docs/stable/notes/serialization.html and Python's pickletools.
"""

from __future__ import annotations

import math
import mmap
import os
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..errors import ModelError
from ..files.reading import require_file
from ..files.wording import one_line, shown
from .stored import Checkpoint, StoredTensor

_MAX_PICKLE_BYTES = 16 << 20  # a tensor takes about 300
_MAX_INSTRUCTIONS = 4 << 20  # a tensor takes about 40
_MAX_DIRECTORY_BYTES = 32 << 20
_MAX_DIMENSIONS = 64
_PROTOCOL = 2
_ORDERED_DICT = ("collections", "OrderedDict")
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = ("torch._utils", "_rebuild_parameter")
# A storage's class: our word for its numbers, and the bytes of one.
_STORAGES = {
    ("torch", f"{name}Storage"): kind
    for name, kind in {
        "Double": ("F64", 8),
        "Float": ("F32", 4),
        "Half": ("F16", 2),
        "BFloat16": ("BF16", 2),
        "Long": ("I64", 8),
        "Int": ("I32", 4),
        "Short": ("I16", 2),
        "Char": ("I8", 1),
        "Byte": ("U8", 1),
        "Bool": ("BOOL", 1),
    }.items()
}
_CALLABLE = (_ORDERED_DICT, _REBUILD, _PARAMETER)
_END_OF_DIRECTORY = struct.Struct("<4s4H2LH")
_END_64_LOCATOR = struct.Struct("<4sLQL")
_END_64_BYTES = 56
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")


class NotPlainTensorsError(ValueError):
    """A file that is not a zip archive of named tensors and nothing else. The message says what is in it instead."""


class _Name(NamedTuple):
    """A function or class that the pickle names. It is never looked up."""

    module: str
    name: str


class _Storage(NamedTuple):
    dtype: str
    item_bytes: int
    start: int
    length: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]


def open_pytorch_file(path: Path) -> Checkpoint:
    """All tensors of a file, by their names.

    Raises NotPlainTensorsError for a file that holds anything else, and ModelError for one that cannot be read.
    """
    require_file(path)
    try:
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
    entries = _entries(path, file)
    version = (str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    content = np.frombuffer(file, np.uint8)
    checkpoint: Checkpoint = {}
    for name, tensor in _named_tensors(file, entries):
        storage, count = tensor.storage, math.prod(tensor.shape)
        start = storage.start + tensor.offset * storage.item_bytes
        data = content[start : start + count * storage.item_bytes]
        checkpoint[name] = StoredTensor(path, version, storage.dtype, tensor.shape, data, start)
    return checkpoint


def _entries(path: Path, file: mmap.mmap) -> dict[str, tuple[int, int]]:
    """Where the archive's files lie in it, by their names without the folder: first byte and size."""
    _require_small_directory(file)
    entries: dict[str, tuple[int, int]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error, OverflowError) as error:
        raise NotPlainTensorsError(f"it is not a zip archive that can be read: {one_line(error)}") from error
    for entry in listed:
        name, at, size = entry.filename.partition("/")[2], entry.header_offset, entry.file_size
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != size or entry.flag_bits & 1:
            _refuse(f"{shown(entry.filename)} is compressed or encrypted")
        if not 0 <= at <= len(file) - _LOCAL_HEADER.size:
            _refuse(f"{shown(entry.filename)} lies outside of the file")
        signature, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(file, at)
        start = at + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if signature != b"PK\x03\x04" or start + size > len(file):
            _refuse(f"{shown(entry.filename)} lies outside of the file")
        if name in entries:
            _refuse(f"{shown(name)} occurs twice")
        entries[name] = (start, size)
    return entries


def _require_small_directory(file: mmap.mmap) -> None:
    """The zip library reads all of the directory, however long it is."""
    at = file.rfind(b"PK\x05\x06", max(len(file) - 65_536 - _END_OF_DIRECTORY.size, 0))
    if not 0 <= at <= len(file) - _END_OF_DIRECTORY.size:
        _refuse("it is not a zip archive, as torch.save writes it since 1.6")
    sizes = [_END_OF_DIRECTORY.unpack_from(file, at)[5]]
    locator = at - _END_64_LOCATOR.size
    if locator >= 0 and file[locator : locator + 4] == b"PK\x06\x07":
        # Some versions of the library take the record before the locator, others the one that it names.
        ends = (locator - _END_64_BYTES, _END_64_LOCATOR.unpack_from(file, locator)[2])
        there = [end for end in ends if 0 <= end <= len(file) - _END_64_BYTES and file[end : end + 4] == b"PK\x06\x06"]
        sizes += [struct.unpack_from("<Q", file, end + 40)[0] for end in there]
    size = max(size for size in sizes if size != 0xFFFFFFFF or len(sizes) == 1)
    if size > _MAX_DIRECTORY_BYTES:
        _refuse(f"its directory has {size} bytes, more than {_MAX_DIRECTORY_BYTES}")


def _named_tensors(file: mmap.mmap, entries: dict[str, tuple[int, int]]) -> Iterator[tuple[str, _Tensor]]:
    if "data.pkl" not in entries:
        _refuse("it has no data.pkl")
    if "byteorder" in entries:
        start, size = entries["byteorder"]
        if file[start : start + min(size, 16)] != b"little":
            _refuse("its numbers are big-endian")
    start, size = entries["data.pkl"]
    if size > _MAX_PICKLE_BYTES:
        _refuse(f"data.pkl has {size} bytes, more than {_MAX_PICKLE_BYTES}")
    value = _Machine(entries).run(file[start : start + size])
    if not isinstance(value, dict):
        _refuse(f"it holds {_kind(value)} in place of named tensors")
    for name, tensor in value.items():
        if not isinstance(tensor, _Tensor):
            _refuse(f"{shown(name)} is {_kind(tensor)}, not a tensor")
        yield name, tensor


class _Machine:
    """Runs a pickle's instructions. It calls nothing: what a file may call are the three names of `_CALLABLE`."""

    def __init__(self, entries: dict[str, tuple[int, int]]) -> None:
        self._entries = entries
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._does: dict[str, Callable[[Any], None]] = {
            "PROTO": self._protocol,
            "GLOBAL": self._name,
            "BINPERSID": self._storage,
            "REDUCE": self._call,
            "BUILD": self._build,
            "MARK": lambda _: self._marks.append(len(self._stack)),
            "TUPLE": lambda _: self._stack.append(tuple(self._since_mark())),
            "APPEND": lambda _: self._append([self._pop()]),
            "APPENDS": lambda _: self._append(self._since_mark()),
            "SETITEM": lambda _: self._set([self._pop(), self._pop()][::-1]),
            "SETITEMS": lambda _: self._set(self._since_mark()),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "EMPTY_TUPLE": lambda _: self._stack.append(()),
            "NONE": lambda _: self._stack.append(None),
            "NEWTRUE": lambda _: self._stack.append(True),
            "NEWFALSE": lambda _: self._stack.append(False),
        }
        for number in (1, 2, 3):
            self._does[f"TUPLE{number}"] = lambda _, n=number: self._stack.append(tuple(self._take(n)))  # type: ignore[misc]
        for name in ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"):
            self._does[name] = self._stack.append
        for name in ("BINPUT", "LONG_BINPUT"):
            self._does[name] = lambda at: self._memo.__setitem__(at, self._top())
        for name in ("BINGET", "LONG_BINGET"):
            self._does[name] = self._remembered

    def run(self, program: bytes) -> Any:
        """What the program makes. Raises NotPlainTensorsError."""
        try:
            for count, (instruction, argument, _) in enumerate(pickletools.genops(program)):
                if count > _MAX_INSTRUCTIONS:
                    _refuse(f"data.pkl has more than {_MAX_INSTRUCTIONS} instructions")
                if instruction.name == "STOP":
                    break
                does = self._does.get(instruction.name)
                if does is None:
                    _refuse(f"data.pkl has the instruction {instruction.name}")
                does(argument)
            value = self._pop()
        except NotPlainTensorsError:
            raise
        except (ValueError, LookupError, OverflowError) as error:
            raise NotPlainTensorsError(f"data.pkl is broken: {one_line(error)}") from error
        if self._stack:
            _refuse("data.pkl is broken: it leaves values behind")
        return value

    def _protocol(self, version: int) -> None:
        if version != _PROTOCOL:
            _refuse(f"data.pkl has pickle's protocol {version}, not {_PROTOCOL}")

    def _name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        known = _Name(module, name)
        if known not in _CALLABLE and known not in _STORAGES:
            _refuse(f"it needs {shown(f'{module}.{name}')}")
        self._stack.append(known)

    def _storage(self, _: None) -> None:
        match self._pop():
            case ("storage", _Name() as kind, str() as key, str(), int() as count) if kind in _STORAGES:
                dtype, item_bytes = _STORAGES[kind]
            case _:
                _refuse("data.pkl names a storage in an unknown way")
        if f"data/{key}" not in self._entries:
            _refuse(f"it lacks data/{shown(key)}")
        start, size = self._entries[f"data/{key}"]
        if not 0 <= count <= size // item_bytes:
            _refuse(f"data/{shown(key)} has {size} bytes, too few for {count} numbers of {dtype}")
        self._stack.append(_Storage(dtype, item_bytes, start, count))

    def _call(self, _: None) -> None:
        function, arguments = self._take(2)
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            _refuse("data.pkl calls something that is not a function")
        if function == _ORDERED_DICT and not arguments:
            self._stack.append({})
        elif function == _PARAMETER and len(arguments) == 3 and isinstance(arguments[0], _Tensor):
            self._stack.append(arguments[0])
        elif function == _REBUILD:
            self._stack.append(_tensor(arguments))
        else:
            _refuse(f"data.pkl calls {function.name} in an unknown way")

    def _build(self, _: None) -> None:
        """Ignores what torch keeps with a dictionary of tensors: versions of modules, which weights do not need."""
        owner, state = self._take(2)
        if not isinstance(owner, dict) or not isinstance(state, dict) or not set(state) <= {"_metadata"}:
            _refuse("data.pkl sets members of an object")
        self._stack.append(owner)

    def _append(self, values: list[Any]) -> None:
        if not isinstance(owner := self._top(), list):
            _refuse("data.pkl appends to something that is not a list")
        owner.extend(values)

    def _set(self, pairs: list[Any]) -> None:
        owner = self._top()
        if not isinstance(owner, dict) or len(pairs) % 2:
            _refuse("data.pkl sets members of something that is not a dictionary")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, str) or not key.isprintable():
                _refuse(f"a name is {_kind(key)}" if not isinstance(key, str) else f"a name is {shown(ascii(key))}")
            owner[key] = value

    def _remembered(self, at: int) -> None:
        self._stack.append(self._memo[at])

    def _since_mark(self) -> list[Any]:
        at = self._marks.pop()
        values = self._stack[at:]
        del self._stack[at:]
        return values

    def _take(self, count: int) -> list[Any]:
        return [self._pop() for _ in range(count)][::-1]

    def _pop(self) -> Any:
        self._top()
        return self._stack.pop()

    def _top(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise ValueError("its stack is empty")
        return self._stack[-1]


def _tensor(arguments: tuple[Any, ...]) -> _Tensor:
    if not 6 <= len(arguments) <= 7:
        _refuse("data.pkl makes a tensor in an unknown way")
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, _Storage) or not _are_sizes((offset,)):
        _refuse("data.pkl makes a tensor in an unknown way")
    if not _are_sizes(shape) or not _are_sizes(strides) or len(shape) != len(strides):
        _refuse("data.pkl makes a tensor with an impossible shape")
    needed = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != needed and 0 not in shape:
            _refuse(f"a tensor of shape {shape} is not stored row by row")
        needed *= size
    if offset + needed > storage.length:
        _refuse(f"a tensor of shape {shape} does not fit in its storage of {storage.length} numbers")
    return _Tensor(storage, offset, shape)


def _are_sizes(values: object) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) <= _MAX_DIMENSIONS
        and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
    )


def _kind(value: object) -> str:
    if isinstance(value, _Tensor):
        return "a tensor"
    return f"a {type(value).__name__}" if value is not None else "nothing"


def _refuse(reason: str) -> NoReturn:
    raise NotPlainTensorsError(reason)
