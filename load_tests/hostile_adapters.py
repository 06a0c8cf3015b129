"""LoRA adapters that are made to harm the server that loads them, and a valid one."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

from attack import Attack, Kinds, Wire, new_word
from lora import make_adapter

from tidewheel.engine.models import describe
from tidewheel.engine.weights import open_source

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WEIGHT = 1.0
_EMPTY_TENSOR = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


class AdapterFolder:
    """A folder of a model's adapters: `good`, and adapters that no server should load."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.good = make_adapter(folder / "good", describe(open_source(str(model)).config), rank=1, seed=0)
        weights = (self.good / _WEIGHTS).read_bytes()
        length = int.from_bytes(weights[:8], "little")
        header, data = weights[8 : 8 + length], weights[8 + length :]
        many = ",".join(_EMPTY_TENSOR % i for i in range((8 << 20) // (len(_EMPTY_TENSOR) + 6))).encode()
        for name, content in (
            ("large config", b'{"peft_type": "LORA", "a": "' + b"a" * 60_000_000 + b'"}'),
            ("deep config", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
            ("wide config", b'{"a": [' + b"[]," * 300_000 + b"[]]}"),
            ("config that is none", b"\0" * 1000),
        ):
            self._copy(name, _CONFIG, partial(Path.write_bytes, data=content))
        for name, content in (
            ("full header", _file(b"{" + many + b"}", b"")),
            ("tensors that overlap", _file(header.replace(b"[0,", b"[4,"), data)),
            ("values that are none", _file(header, b"\xff" * len(data))),
            ("half a file", weights[: len(weights) // 2]),
            ("noise", random.Random(0).randbytes(1 << 20)),
        ):
            self._copy(name, _WEIGHTS, partial(Path.write_bytes, data=content))
        self._copy("large header", _WEIGHTS, partial(_sparse, size=99_000_100, begin=struct.pack("<Q", 99_000_000)))
        self._copy("large file", _WEIGHTS, partial(_sparse, size=3 << 30, begin=struct.pack("<Q", 2)))
        for target in ("/dev/zero", "/proc/self/mem", "/proc/kmsg", "nowhere", _WEIGHTS):
            self._copy(f"link to {Path(target).name}", _WEIGHTS, partial(Path.symlink_to, target=target))
        self._copy("config without end", _CONFIG, partial(Path.symlink_to, target="/dev/zero"))
        self._copy("pipe", _WEIGHTS, os.mkfifo)
        self._copy("folder", _WEIGHTS, os.mkdir)
        gguf = struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 2**60)
        _sparse(folder / "large.gguf", 3 << 30, gguf)
        _sparse(folder / "long.gguf", 20 << 20, struct.pack("<4sIQQQ1sIQ", b"GGUF", 3, 0, 1, 1, b"a", 8, 2**24 + 9))
        (folder / "endless.gguf").symlink_to("/dev/zero")
        os.mkfifo(folder / "pipe.gguf")

    def attacks(self, wire: Wire) -> Kinds:
        """One kind of attack for each adapter that no server should load, and for paths without an adapter."""
        bad = [str(path) for path in sorted(self.folder.iterdir()) if path != self.good]
        paths = [*bad, "/", "/dev/zero", "/proc/self/fd/0", "a" * 4096, "/" + "b" * 4095, "../" * 1000, "own/model"]
        return [(_WEIGHT, partial(_load, wire, path)) for path in paths]

    def _copy(self, name: str, file: str, put: Callable[[Path], object]) -> None:
        """The valid adapter with one file replaced."""
        copy = self.folder / name
        shutil.copytree(self.good, copy)
        (copy / file).unlink()
        put(copy / file)


def _load(wire: Wire, path: str, rng: random.Random) -> Attack:
    body = {"lora_name": new_word(rng), "lora_path": path}
    return wire.post(f"adapter: {Path(path).name[:30]}", LOAD, body, frozenset({400, 429}))


def _file(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _sparse(path: Path, size: int, begin: bytes) -> None:
    path.write_bytes(begin)
    os.truncate(path, size)
