"""What is wrong with the options that somebody gave, collected from all places so that it can be told at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .option import OptionError

P = ParamSpec("P")
T = TypeVar("T")


def made(value: T | None) -> T:
    """What `Mistakes.attempt` has returned, after it was asked whether there are any."""
    assert value is not None, "what cannot be made is a mistake"
    return value


class Mistakes:
    """Collects them in the order in which they were found. `where` stands before those of one place."""

    def __init__(self, where: str = "") -> None:
        self.sentences: list[str] = []
        self._where = where

    def add(self, sentence: str) -> None:
        """Note one, unless it is known."""
        if (said := self._where + sentence) not in self.sentences:
            self.sentences.append(said)

    def attempt(self, make: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
        """What `make` returns; None, and a note of what is wrong, if it raises OptionError."""
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
