"""How far a folder of quantized weights is: what is finished outlasts the process that was at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..files.folder import read_json
from ..files.reading import is_there
from ..files.wording import shown
from .report import TensorReport
from .shard_file import part_of, sha256_of, write_json

JOURNAL = "tidewheel-quantizing.json"


class Journal:
    """The journal in `folder`, which is made if need be. `settings` are all that its files follow from.

    Raises ModelError if the folder holds something else, or was begun with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._path, self._settings = folder / JOURNAL, dict(settings)
        self._shards: dict[str, Any] = {}
        if is_there(self._path):
            found = read_json(self._path)
            self._require_same(found.get("settings"))
            self._shards = dict(found["shards"])
            return
        begun = part_of(self._path)
        if is_there(folder) and (not folder.is_dir() or any(path != begun for path in folder.iterdir())):
            raise ModelError(f"{folder} is there already, and is not a quantization that was begun: name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
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
        self._path.unlink()

    def _write(self) -> None:
        write_json(self._path, {"settings": self._settings, "shards": self._shards})

    def _require_same(self, settings: object) -> None:
        if not isinstance(settings, dict):
            raise ModelError(f"{self._path} is not the journal of a quantization: remove {self._path.parent}")
        other = [name for name in self._settings if settings.get(name) != self._settings[name]]
        if other:
            was = "; ".join(
                f"{name} was {shown(settings.get(name))}, is {shown(self._settings[name])}" for name in other
            )
            raise ModelError(
                f"{self._path.parent} has a quantization that was begun with other settings ({was}): go on with those, "
                "remove it, or name another folder"
            )
