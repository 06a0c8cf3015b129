"""Typed access to a GGUF file's metadata."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ModelError
from ...files.wording import shown
from .reader import GgufFile, GgufStrings

_MOST = 2.0**127  # numbers that float32 holds


class Fields:
    """The metadata whose keys begin with `prefix`. An absent key takes the default; without one it is required.

    All methods raise ModelError, naming the file and the key, for a value of the wrong kind.
    """

    def __init__(self, file: GgufFile, prefix: str = "") -> None:
        self._file, self._prefix = file, prefix

    @property
    def path(self) -> Path:
        """The file, for errors."""
        return self._file.path

    def raw(self, key: str) -> Any:
        """The value as it is; None if there is none."""
        return self._file.metadata.get(self._prefix + key)

    def error(self, key: str, rule: str) -> ModelError:
        """What to raise where the value breaks `rule`."""
        value = self.raw(key)
        got = "there is none" if value is None else f"got {shown(value)}"
        return ModelError(f"{self._file.path}: {self._prefix}{key} must be {rule}, {got}")

    def optional_integer(self, key: str, least: int = 0) -> int | None:
        """An integer of at least `least`."""
        value = self.raw(key)
        if value is not None and (type(value) is not int or not least <= value < 2**31):
            raise self.error(key, f"an integer of at least {least}, and below 2^31")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.optional_integer(key, 1)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "a positive integer")
        return value

    def optional_number(self, key: str) -> float | None:
        """A finite number."""
        value = self.raw(key)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise self.error(key, "a number")
        number: float | None = value
        return number

    def number(self, key: str) -> float:
        """A finite number that must be there."""
        value = self.optional_number(key)
        if value is None:
            raise self.error(key, "a number")
        return value

    def text(self, key: str) -> str:
        """A string that must be there."""
        value = self.optional_text(key)
        if value is None:
            raise self.error(key, "a string")
        return value

    def optional_text(self, key: str) -> str | None:
        """A string."""
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A bool."""
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "a bool")
        return default if value is None else value

    def strings(self, key: str) -> GgufStrings:
        """An array of strings that must be there. None of them is made yet."""
        value = self.raw(key)
        if not isinstance(value, GgufStrings):
            raise self.error(key, "an array of strings")
        return value

    def texts(self, key: str) -> list[str]:
        """The strings of an array that must be there."""
        return self.strings(key).to_list()

    def numbers(self, key: str, count: int, kind: str = "i") -> list[Any] | None:
        """An array of `count` finite numbers, integers unless `kind` is "f"."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in ("iu" if kind == "i" else "f"):
            raise self.error(key, "an array of numbers")
        if len(value) != count or (kind == "f" and not (np.abs(value) < _MOST).all()):
            raise ModelError(
                f"{self._file.path}: {self._prefix}{key} must be {count} finite numbers, one for each token"
            )
        numbers: list[Any] = value.tolist()
        return numbers
