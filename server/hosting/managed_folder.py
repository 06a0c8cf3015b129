"""ManagedFolder: the folder of models that clients may change, and the copies that they have made of its models."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from tidewheel.engine.errors import ModelError
from tidewheel.engine.files.reading import is_there, read_file

from ..errors import ApiError
from .catalog import Catalog

logger = logging.getLogger(__name__)

_FILE = ".tidewheel-copies.json"  # hidden files are no models
_MAX_BYTES = 4 << 20


class _Copies(msgspec.Struct):
    copies: dict[str, str] = {}


class ManagedFolder:
    """A copy is a name for a model that has another one. A file in the folder keeps them for later starts."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._path = Path(folder).expanduser() / _FILE
        self.copies: dict[str, str] = {}
        """The models that are copied, by the names of their copies, as far as they are served."""

    def serve_copies(self, catalog: Catalog) -> None:
        """Add the copies of earlier starts to a catalog. Those of models that are not there are logged.

        Raises ModelError for a file that is broken.
        """
        for name, source in self._read().items():
            try:
                catalog.copy(source, name)
            except (ApiError, ModelError) as error:
                logger.warning("The copy %s of %s is not served: %s", name, source, error)
            else:
                self.copies[name] = source

    def keep(self, name: str, source: str) -> None:
        """Remember a copy. Blocks. Raises ModelError and OSError if that cannot be."""
        self._write({**self._read(), name: source})

    def forget(self, names: Iterable[str]) -> None:
        """Forget copies. Blocks. Raises ModelError and OSError if that cannot be."""
        gone = {*names}
        if gone & (kept := self._read()).keys():
            self._write({name: source for name, source in kept.items() if name not in gone})

    def _read(self) -> Mapping[str, str]:
        if not is_there(self._path):
            return {}
        try:
            return msgspec.json.decode(read_file(self._path, _MAX_BYTES), type=_Copies).copies
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ModelError(
                f"{self._path}, which has the copies of models, is broken: mend it, or delete it: {error}"
            ) from error

    def _write(self, copies: Mapping[str, str]) -> None:
        part = self._path.with_suffix(f".{os.getpid()}")
        try:
            part.write_bytes(msgspec.json.encode(_Copies(dict(copies))))
            part.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
