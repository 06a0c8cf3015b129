"""What is wrong with the options that somebody gave, collected from all places so that it can be told at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tidewheel.engine.declaring.option import OptionError

P = ParamSpec("P")
T = TypeVar("T")


class MistakesError(OptionError):
    """Several mistakes, each a sentence."""

    def __init__(self, sentences: list[str]) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = sentences


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
        except MistakesError as errors:
            for sentence in errors.sentences:
                self.add(sentence)
        except OptionError as error:
            self.add(str(error))
        return None

    def raise_any(self) -> None:
        """Raise OptionError if there are any."""
        if self.sentences:
            raise MistakesError(self.sentences) if len(self.sentences) > 1 else OptionError(self.sentences[0])

    def __str__(self) -> str:
        """One is a line, several are a list."""
        if len(self.sentences) == 1:
            return self.sentences[0]
        return "\n  ".join([f"{len(self.sentences)} things are wrong:", *self.sentences])
