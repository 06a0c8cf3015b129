"""What a harness is."""

from __future__ import annotations

import atexit
import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tidewheel.engine.errors import ModelError

FILE = re.compile(r"\w\.(gguf|json|model|onnx|safetensors)\b")


class Harness(NamedTuple):
    """`run` reads one input, which looks like `seeds`."""

    run: Callable[[bytes], None]
    seeds: list[bytes]


def written(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


@functools.cache
def made_folder() -> Path:
    root = Path("/dev/shm")  # memory: a disk would be what is tested
    made = Path(tempfile.mkdtemp(dir=root if root.is_dir() else None))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def in_folder(
    files: Callable[[bytes], dict[str, bytes]], read: Callable[[Path], object], *, names_files: bool = False
) -> Callable[[bytes], None]:
    """A harness of a model folder: `files` makes its files of an input, by their names.

    Errors in them must raise ModelError. With `names_files` it must name the file.
    """

    def run(data: bytes) -> None:
        folder = made_folder()
        shutil.rmtree(folder)
        for name, content in files(data).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        try:
            read(folder)
        except ModelError as error:
            if names_files and not FILE.search(str(error)):
                raise AssertionError("the error names no file") from error

    return run
