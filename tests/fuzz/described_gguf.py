"""The harness of GGUF files that are described in JSON: well-formed, whatever they hold.

The harness of bytes is for files that are not. So changes reach the code that reads metadata and tensors: a family's
fields, the names and shapes of its tensors, its tokenizer, the parts of a split model.

A file is `{"metadata": {key: [type, value]}, "tensors": {name: [type, dims, bytes]}}`, with types by their numbers,
arrays as `[9, [type, values]]`, dims as in files, and bytes that are repeated. A split one is `{"parts": [file, ...]}`.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import gguf

SEEDS = Path(__file__).parent / "gguf_seeds.json"
ENCODER_SEEDS = Path(__file__).parent / "gguf_encoder_seeds.json"
_TEXT, _ARRAY, _BOOL = 8, 9, 7
_INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_FLOATS = {6: "<f", 12: "<d"}
_MAX_BYTES = 1 << 21  # of a tensor; a larger one has no content
_MAX_PARTS = 4
_ALIGNMENT = 32


def seeds(path: Path = SEEDS) -> list[bytes]:
    """Files of a dozen families, with types of tensors and tokenizers of every kind; `make_gguf_seeds` makes them."""
    return [json.dumps(seed).encode() for seed in json.loads(path.read_text())]


def files(data: bytes) -> dict[str, bytes]:
    """The files of an input, by their names."""
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        said = None
    parts = said.get("parts") if isinstance(said, dict) else None
    if not isinstance(parts, list) or not 1 < len(parts) <= _MAX_PARTS:
        return {"model.gguf": _file(said)}
    return {f"model-{i:05}-of-{len(parts):05}.gguf": _file(part) for i, part in enumerate(parts, 1)}


def _file(said: Any) -> bytes:
    said = said if isinstance(said, dict) else {}
    keys = [_key(name, *pair) for name, pair in _pairs(said.get("metadata"), 2)]
    head, data = [], b""
    for name, (kind, dims, content) in _pairs(said.get("tensors"), 3):
        if _is_list(dims, int) and _is(kind, int):
            data += bytes(-len(data) % _ALIGNMENT)
            sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *(_wrapped(size, 64) for size in dims))
            head.append(_text(name) + sizes + struct.pack("<IQ", _wrapped(kind, 32), len(data)))
            data += _content(kind, dims, content)
    counts = struct.pack("<IQQ", 3, len(head), sum(map(bool, keys)))
    start = b"GGUF" + counts + b"".join(keys) + b"".join(head)
    return start + bytes(-len(start) % _ALIGNMENT) + data


def _key(name: str, kind: Any, value: Any) -> bytes:
    """A key with its value; nothing for a value that no file can have."""
    content = None
    if kind == _ARRAY and isinstance(value, list) and len(value) == 2 and _is(value[0], int):
        items = [_scalar(value[0], item) for item in value[1]] if isinstance(value[1], list) else []
        found = [item for item in items if item is not None]
        content = struct.pack("<IQ", _wrapped(value[0], 32), len(found)) + b"".join(found)
    elif _is(kind, int):
        content = _scalar(kind, value)
    return b"" if content is None else _text(name) + struct.pack("<I", _wrapped(kind, 32)) + content


def _scalar(kind: int, value: Any) -> bytes | None:
    if kind == _TEXT:
        return _text(value) if isinstance(value, str) else None
    if not isinstance(value, (int, float)):
        return None
    if kind == _BOOL:
        return bytes([_wrapped(value, 8)]) if isinstance(value, int) else None
    if kind in _INTEGERS and isinstance(value, int):
        size = struct.calcsize(_INTEGERS[kind])
        return _wrapped(value, 8 * size).to_bytes(size, "little")
    with contextlib.suppress(OverflowError):
        return struct.pack(_FLOATS[kind], value) if kind in _FLOATS else None
    return None


def _content(kind: int, dims: list[int], said: Any) -> bytes:
    with contextlib.suppress(ValueError):
        elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        count = math.prod(dims) // elements * size
        pattern = bytes(_wrapped(byte, 8) for byte in said) if _is_list(said, int) else b""
        if 0 <= count <= _MAX_BYTES:
            pattern = pattern or b"\0"
            return (pattern * (count // len(pattern) + 1))[:count]
    return b""


def _pairs(said: Any, count: int) -> list[tuple[str, list[Any]]]:
    if not isinstance(said, dict):
        return []
    return [(name, value) for name, value in said.items() if isinstance(value, list) and len(value) == count]


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", "replace")
    return struct.pack("<Q", len(encoded)) + encoded


def _wrapped(value: int, bits: int) -> int:
    return value & ((1 << bits) - 1)


def _is(value: Any, kind: type) -> bool:
    return type(value) is kind


def _is_list(values: Any, kind: type) -> bool:
    return isinstance(values, list) and len(values) < 99 and all(_is(value, kind) for value in values)
