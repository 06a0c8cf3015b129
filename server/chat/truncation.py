"""Conversations that are longer than the context: the oldest turns go first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from ..protocol.chat import Message

_LASTING_ROLES = ("system", "developer")


def drop_oldest_turns(messages: list[Message], fits: Callable[[list[Message]], bool]) -> list[Message]:
    """`messages` without the oldest turns. As few are dropped as possible until the rest `fits`.

    A turn begins with a user's message, so a tool's result never stays without its call. Instructions always stay. If
    even the last turn alone does not fit, nothing is dropped. `fits` is called O(log n) times.
    """
    if fits(messages):
        return messages
    starts = [i for i, message in enumerate(messages) if message.role == "user"]

    def rest(start: int) -> list[Message]:
        return [message for i, message in enumerate(messages) if i >= start or message.role in _LASTING_ROLES]

    first = bisect_left(starts, True, key=lambda start: fits(rest(start)))
    return rest(starts[first]) if first < len(starts) else messages
