"""The parts of a model's turn, as they arrive: text for the user, reasoning, and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec


class Reasoning(msgspec.Struct, frozen=True):
    """What the model thought, before its answer or between parts of it."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A tool call begins. `index` counts the calls of one choice; arguments follow in CallArguments with that index."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments. All fragments of a call, joined, are the JSON object of its arguments.

    The exceptions: the model broke off, or did not keep to its format.
    """

    index: int
    text: str


Piece: TypeAlias = str | Reasoning | CallStart | CallArguments
"""A plain str is text for the user. Pieces come in the order in which the model wrote them, and are never empty."""


class Call(msgspec.Struct):
    """A whole tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Turn(msgspec.Struct):
    """A whole turn: pieces, put together."""

    content: str
    reasoning: str
    calls: list[Call]

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Turn:
        """The turn that consists of `pieces`."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[tuple[CallStart, list[str]]] = []
        for piece in pieces:
            if isinstance(piece, str):
                content.append(piece)
            elif isinstance(piece, Reasoning):
                reasoning.append(piece.text)
            elif isinstance(piece, CallStart):
                calls.append((piece, []))
            else:
                calls[piece.index][1].append(piece.text)
        joined = [Call(start.id, start.name, "".join(arguments)) for start, arguments in calls]
        return cls("".join(content), "".join(reasoning), joined)
