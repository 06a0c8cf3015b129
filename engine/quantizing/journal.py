"""How far a folder of quantized weights is: what is finished outlasts the process that was at it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..files.folder import read_json
from ..files.reading import is_there
from ..files.wording import shown
from .report import TensorReport
from .whole_files import lock, part_of, sha256_of, write_json, writing

if TYPE_CHECKING:
    from typing_extensions import Self

JOURNAL = "tidewheel-quantizing.json"


class Journal:
    """The journal in `folder`, which is made if need be. `settings` are all that its files follow from.

    A context manager, which keeps other processes out. Raises ModelError if the folder holds something else, was begun
    with other settings, or is being written by another process.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._folder, self._path, self._settings = folder, folder / JOURNAL, dict(settings)
        self._shards: dict[str, Any] = {}

    def __enter__(self) -> Self:
        if is_there(self._folder) and not self._folder.is_dir():
            raise self._something_else()
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._begin()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _begin(self) -> None:
        lock(self._lock, self._folder)
        if is_there(self._path):
            self._read()
        elif any(path != part_of(self._path) for path in self._folder.iterdir()):
            raise self._something_else()
        else:
            self._write()

    def finished(self, name: str) -> Sequence[TensorReport] | None:
        """The tensors of the shard `name`; None if it is not finished, or its file is not what it was then."""
        shard = self._shards.get(name)
        if shard is None or sha256_of(self._path.with_name(name)) != shard["sha256"]:
            return None
        return [TensorReport(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in shard["tensors"]]

    def finish(self, name: str, sha256: str, tensors: Sequence[TensorReport]) -> None:
        """The shard `name` is there, with that content."""
        self._shards[name] = {"sha256": sha256, "tensors": [asdict(tensor) for tensor in tensors]}
        self._write()

    def remove(self) -> None:
        """The folder is complete."""
        with writing(self._path):
            self._path.unlink()

    def _write(self) -> None:
        write_json(self._path, {"settings": self._settings, "shards": self._shards})

    def _read(self) -> None:
        found = read_json(self._path)
        settings, shards, now = found.get("settings"), found.get("shards"), self._settings
        if not isinstance(settings, dict) or not isinstance(shards, dict):
            raise ModelError(f"{self._path} is not the journal of a quantization: remove {self._folder}")
        other = [name for name in now if settings.get(name) != now[name]]
        if other:
            was = "; ".join(f"{name} was {shown(settings.get(name))}, is {shown(now[name])}" for name in other)
            raise ModelError(
                f"{self._folder} has a quantization that was begun with other settings ({was}): go on with those, "
                "remove it, or name another folder"
            )
        self._shards = shards

    def _something_else(self) -> ModelError:
        return ModelError(f"{self._folder} is there already, and is no quantization that was begun: name a new folder")
