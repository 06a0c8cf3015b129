"""Writing files that are whole or not there, safetensors and others.

The format: https://github.com/huggingface/safetensors#format

The `safetensors` library checks each file when it is read. It does not write them, because older releases have to have
all tensors in memory as bytes, and none has numpy's bfloat16.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..errors import ModelError
from ..files.wording import reason

_WORDS = {"<i4": "I32", "<f2": "F16", "<u2": "BF16", "<f4": "F32", "|i1": "I8"}
_ALIGNMENT = 8
_PIECE_BYTES = 1 << 24


class FileTensor(Struct, frozen=True):
    """A tensor to be written: the file's word for its type, its shape, and its bytes, often of a mapped file."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def file_tensor(array: NDArray[Any]) -> FileTensor:
    """Numbers of a type that quantized matrices are stored in. Those of uint16 are the bits of bfloat16."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return FileTensor(_WORDS[little.dtype.str], array.shape, little.reshape(-1).view(np.uint8))


def write_safetensors(path: Path, tensors: Mapping[str, FileTensor]) -> str:
    """Write a file, and wait until the disk has it. Returns its SHA-256 in hexadecimal digits.

    Raises ModelError if it cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without which transformers refuses a file
    end = 0
    # Wide numbers come first, so that all lie where they can be read without a copy.
    ordered = dict(sorted(tensors.items(), key=lambda entry: -_item_bytes(entry[1])))
    for name, tensor in ordered.items():
        start, end = end, end + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256()
    with writing(path), path.open("wb") as file:
        for data in (memoryview(head), *(tensor.data.data for tensor in ordered.values())):
            for start in range(0, len(data), _PIECE_BYTES):
                piece = data[start : start + _PIECE_BYTES]
                digest.update(piece)
                file.write(piece)
        _sync(file)
    return digest.hexdigest()


def sha256_of(path: Path) -> str | None:
    """That of a file's content; None if there is no such file."""
    digest = hashlib.sha256()
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
        return digest.hexdigest()
    return None


def write_json(path: Path, value: object) -> None:
    """Write a JSON file, which is the old one until it is the whole new one. Raises ModelError if it cannot be."""
    with writing(path), replacing(path) as part, part.open("wb") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
        _sync(file)


def copy_file(source: Path, path: Path) -> None:
    """Copy a file to `path`, whose folder is made if need be. Raises ModelError if it cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            shutil.copyfile(source, part)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context in which errors of the system become ModelErrors that name the path."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {reason(error)}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name to write a file by. It gets its own name if nothing was raised."""
    part = part_of(path)
    yield part
    os.replace(part, path)


def lock(file: int, path: Path) -> None:
    """Keep other processes out of `path`, which is open as the descriptor `file`, until that is closed.

    Raises ModelError if another process has locked it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ModelError(f"{path} is being written by another process: wait until it has ended") from error


def part_of(path: Path) -> Path:
    """The name of a file until it is whole."""
    return path.with_name(path.name + ".part")


def _item_bytes(tensor: FileTensor) -> int:
    return tensor.data.nbytes // max(math.prod(tensor.shape), 1)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
