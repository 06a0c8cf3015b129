"""Room: what loaded units share, who must go so that another can be loaded, and what can never be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import ModelError
from .hosted import Hosted
from .units import State

_GIB = 2**30


class Room(NamedTuple):
    """Bytes of the budget, and how many units."""

    num_bytes: int
    slots: int

    @classmethod
    def of(cls, unit: Hosted) -> Room:
        """What a planned unit takes."""
        assert unit.needs is not None
        return cls(unit.needs.total_bytes, 1)

    def without(self, units: Iterable[Hosted]) -> Room:
        """The room that there is when those units are gone."""
        gone = [unit.held_bytes for unit in units if unit.held_bytes is not None]
        return Room(self.num_bytes + sum(gone), self.slots + len(gone))

    def has(self, other: Room) -> bool:
        """Whether the other fits into it."""
        return self.num_bytes >= other.num_bytes and self.slots >= other.slots

    def less(self, other: Room) -> Room:
        """What is left of it beside the other."""
        return Room(self.num_bytes - other.num_bytes, self.slots - other.slots)


def victims_for(needs: Room, units: Sequence[Hosted], room: Room) -> list[Hosted]:
    """Whose end makes enough `room`: no more than it takes, first those that are idle, and the least recently used."""
    holders = [unit for unit in units if unit.held_bytes is not None and not unit.unit.pinned]
    holders = [unit for unit in holders if unit.state is not State.UNLOADING]
    holders.sort(key=lambda unit: (not unit.is_idle, unit.state is State.LOADING, unit.last_used))
    chosen: list[Hosted] = []
    for unit in holders:
        if room.without(chosen).has(needs):
            break
        chosen.append(unit)
    for unit in reversed(chosen[:]):
        rest = [other for other in chosen if other is not unit]
        if room.without(rest).has(needs):
            chosen = rest
    return chosen


def refusal(
    unit: Hosted, units: Sequence[Hosted], room: Room, total_bytes: int | None, max_loaded: int
) -> ModelError | None:
    """Why a unit can never have room beside pinned ones, with the numbers; None if it can."""
    most = room.without(other for other in units if not other.unit.pinned)
    if most.has(Room.of(unit)):
        return None
    pinned = ", ".join(other.name for other in units if other.unit.pinned and other.held_bytes is not None)
    if most.slots < 1:
        return ModelError(
            f"no more than {max_loaded} models are loaded at a time (--max-loaded-models), and these are pinned: "
            f"{pinned}; unpin one, or raise --max-loaded-models"
        )
    left = f", of which pinned ones ({pinned}) leave {most.num_bytes / _GIB:.2f} GiB" if pinned else ""
    return ModelError(
        f"it needs {unit.needs}, more than the {(total_bytes or 0) / _GIB:.2f} GiB that all models may take{left}: "
        f"raise --memory, lower its --kv-cache-space or --max-model-len{', or unpin one' if pinned else ''}"
    )
