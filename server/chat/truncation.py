"""Conversations that are longer than the context: the oldest turns go first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from ..protocol.chat import Message

_LASTING_ROLES = ("system", "developer")


def drop_oldest_turns(messages: list[Message], fits: Callable[[list[Message]], bool]) -> list[Message]:
    """`messages` without as few of the oldest turns as must go until the rest `fits`.

    A turn begins with a user's message, so that no tool's result stays without its call; instructions always stay. If
    not even the last turn fits, nothing is dropped. `fits` is called a logarithmic number of times.
    """
    if fits(messages):
        return messages
    starts = [i for i, message in enumerate(messages) if message.role == "user"]

    def rest(start: int) -> list[Message]:
        return [message for i, message in enumerate(messages) if i >= start or message.role in _LASTING_ROLES]

    first = bisect_left(starts, True, key=lambda start: fits(rest(start)))
    return rest(starts[first]) if first < len(starts) else messages
