"""Reads a speculative config key by key, and notes each value that cannot be used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..declaring.mistakes import Mistakes
from ..declaring.option import listed
from .vllm_options import without_effect

CONFIG = "--speculative-config"


class SpeculativeKeys:
    """The keys of `config`, and those that older flags set, by flag.

    `mistakes` has a sentence for each value that cannot be used. The sentence names the key or flag that was given, and
    the value counts as left out. `notes` has a sentence for each key of vLLM that has no effect. A key that is null
    counts as left out.
    """

    def __init__(self, config: Mapping[str, Any], flags: Mapping[str, tuple[str, Any]]) -> None:
        """`flags` are those that were given, by the key that each of them stands for, with their values."""
        self.mistakes = Mistakes()
        idle = dict(without_effect(config))
        self.notes = [f"{CONFIG}: {key} has no effect: {why}" for key, why in idle.items() if config[key] is not None]
        config = {key: value for key, value in config.items() if key not in idle and value is not None}
        self._values = {**{key: value for key, (_, value) in flags.items()}, **config}
        self._flags = {key: flag for key, (flag, _) in flags.items() if key not in config}
        for key, (flag, value) in flags.items():
            if config.get(key, value) != value:
                self.mistakes.add(
                    f"{flag} {value} and {key} {config[key]!r} of {CONFIG} contradict each other: drop one of them"
                )

    def __bool__(self) -> bool:
        return bool(self._values)

    def get(self, key: str) -> Any:
        """The value as it was given; None without one."""
        return self._values.get(key)

    def add(self, key: str, what: str) -> None:
        """Note what is wrong with a key."""
        self.mistakes.add(f"{self._flags.get(key, f'{CONFIG}: {key}')} {what}")

    def lack(self, what: str) -> None:
        """Note that all that was given says nothing without something else."""
        keys = [key for key in self._values if key not in self._flags]
        given = [*self._flags.values(), *([f"{CONFIG} with {listed(keys)}"] if keys else [])]
        self.mistakes.add(f"{listed(given)} {'lacks' if len(given) == 1 else 'lack'} {what}")

    def allow_only(self, keys: tuple[str, ...], method: str) -> None:
        """Note each key that the method does not have."""
        others = sorted(self._values.keys() - {*keys})
        for key in others:
            if key in self._flags:
                self.add(key, f"is not supported with {method}: leave it out")
        if unknown := [key for key in others if key not in self._flags]:
            is_not = "is not" if len(unknown) == 1 else "are not"
            self.mistakes.add(
                f"{CONFIG}: {listed(unknown)} {is_not} supported with {method}; supported are {', '.join(keys)}"
            )

    def text(self, key: str) -> str | None:
        """A string that is not empty."""
        value = self.get(key)
        if value is None or isinstance(value, str):
            return value or None
        self.add(key, f"must be a string, not {value!r}")
        return None

    def number(self, key: str, most: int | None = None) -> int | None:
        """A whole number of at least 1 and at most `most`."""
        value = self.get(key)
        if value is None or (type(value) is int and 1 <= value <= (most or value)):
            return value
        self.add(key, f"must be a number of at least 1{'' if most is None else f' and at most {most}'}, not {value!r}")
        return None

    def whole(self, key: str, default: int, least: int, most: int) -> int:
        """A whole number within these bounds."""
        return int(self._within(key, default, least, most, (int,)))

    def real(self, key: str, default: float, least: float, most: float) -> float:
        """A number within these bounds."""
        return float(self._within(key, default, least, most, (int, float)))

    def _within(self, key: str, default: Any, least: float, most: float, types: tuple[type, ...]) -> Any:
        value = self._values.get(key, default)
        if type(value) in types and math.isfinite(value) and least <= value <= most:
            return value
        self.add(key, f"must be a number from {least:g} to {most:g}, not {value!r}")
        return default
