"""The layout of a GGUF file that is about to be written.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..block_types import BLOCK_TYPES, BlockType
from .choosing import MAGIC

_VERSION, _UINT32 = 3, 4
_ALIGNMENT = 32  # what files without general.alignment have
_NUMBERS = {kind.name: number for number, kind in BLOCK_TYPES.items()}


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor of the file. `shape` has the rows first, as in numpy."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """What its blocks take."""
        return math.prod(self.shape) // self.kind.elements * self.kind.bytes


class GgufLayout:
    """A file: `header` are all bytes before the first tensor, and each tensor begins at its `starts`, of `size` bytes
    in all.

    `metadata` has raw values, as `raw_metadata` and `uint32` give them, and no general.alignment.
    """

    def __init__(self, metadata: Mapping[str, bytes], tensors: Sequence[NewTensor]) -> None:
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += _aligned(tensor.num_bytes)
        parts = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
        parts += [part for key, value in metadata.items() for part in (_text(key), value)]
        for tensor, offset in zip(tensors, offsets, strict=True):
            dims = tensor.shape[::-1]
            numbers = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, _NUMBERS[tensor.kind.name], offset)
            parts += [_text(tensor.name), numbers]
        header = b"".join(parts)
        self.header = header.ljust(_aligned(len(header)), b"\0")
        self.starts = [len(self.header) + offset for offset in offsets]
        self.size = len(self.header) + end


def uint32(value: int) -> bytes:
    """A raw value of the metadata."""
    return struct.pack("<II", _UINT32, value)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
