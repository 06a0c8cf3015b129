"""Mistakes in the options that were given, collected from all places so that they can be reported together."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .option import OptionError

P = ParamSpec("P")
T = TypeVar("T")


def made(value: T | None) -> T:
    """The result of `Mistakes.attempt`, once it is known that there are no mistakes."""
    assert value is not None, "a value that cannot be built must be reported as a mistake"
    return value


class Mistakes:
    """Collects mistakes in the order in which they were found. `where` stands before the mistakes of one place."""

    def __init__(self, where: str = "") -> None:
        self.sentences: list[str] = []
        self._where = where

    def add(self, sentence: str) -> None:
        """Note one, unless it is known."""
        if (said := self._where + sentence) not in self.sentences:
            self.sentences.append(said)

    def attempt(self, make: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
        """The result of `make`; None, and a note of what is wrong, if it raises OptionError."""
        try:
            return make(*arguments, **named)
        except OptionError as error:
            self.add_all(error)
        return None

    def add_all(self, error: OptionError) -> None:
        """Note all that an error tells."""
        for sentence in error.sentences:
            self.add(sentence)

    def raise_any(self) -> None:
        """Raise OptionError if there are any."""
        if self.sentences:
            raise OptionError(*self.sentences)

    def __str__(self) -> str:
        return str(OptionError(*self.sentences))
