"""What a ModelHost holds: units, which can be loaded, and what it tells of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal, Protocol

from msgspec import Struct

from ..errors import BusyError, TidewheelError

Stage = Literal["waiting", "evicting", "reading", "warming up"]

STAGES: tuple[Stage, ...] = ("waiting", "evicting", "reading", "warming up")
"""In the order in which a load goes through them."""

_GIB = 2**30


class NotHostedError(TidewheelError):
    """No unit has that name, or it was removed."""


class LoadFailedError(TidewheelError):
    """A unit that could not be loaded; `__cause__` is why. The next request tries again."""


class UnitBusyError(BusyError):
    """A unit that runs requests, and so is not unloaded."""


class Needs(Struct, frozen=True):
    """The memory that a unit takes while it is loaded, in bytes."""

    weight_bytes: int
    cache_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.cache_bytes

    def __str__(self) -> str:
        """In words, for errors."""
        parts = f"weights {self.weight_bytes / _GIB:.2f}, KV cache {self.cache_bytes / _GIB:.2f}"
        return f"{self.total_bytes / _GIB:.2f} GiB ({parts})"


class State(Enum):
    """A unit's state. What is FAILED keeps its error until the next request tries again."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


class Progress(Struct, frozen=True):
    """How far a load is: `fraction` of all of it, 0 to 1. Neither the stage nor the fraction ever goes back."""

    stage: Stage
    fraction: float = 0.0


Report = Callable[[Progress], None]


class Loaded(Protocol):
    """A unit that is loaded."""

    @property
    def failure(self) -> BaseException | None:
        """What has ended it. The host then unloads it, and the next request loads it anew."""

    @property
    def is_writing(self) -> bool:
        """Whether it still writes what makes its next load faster."""

    async def close(self) -> None:
        """Free everything. Called once, when it has no leases, or when the host stops."""


class Unit(Protocol):
    """What can be loaded: the engines of one or more names."""

    @property
    def name(self) -> str:
        """Of the unit. No two have the same."""

    @property
    def pinned(self) -> bool:
        """Whether it stays loaded when others need room, and however long nobody asks for it."""

    @property
    def idle_s(self) -> float | None:
        """After how many seconds without requests it is unloaded; None: never by time."""

    def plan(self) -> Needs:
        """The memory that it will take. Called in a thread before each load; it reads no weights.

        Raises TidewheelError if it can never be loaded.
        """

    async def load(self, report: Report) -> Loaded:
        """Load it; `report` is called on the event loop. When it is cancelled or raises, nothing of it is left.

        Raises TidewheelError, saying what to change.
        """

    def forget(self) -> None:
        """Drop what is left of it: it was unloaded, or its load has failed or was given up."""


class UnitStatus(Struct, frozen=True):
    """A look at a unit. Times are those of the host's clock, in seconds."""

    name: str
    state: State
    pinned: bool
    needs: Needs | None  # None: never planned
    error: str | None  # of FAILED
    progress: Progress | None  # of LOADING
    leases: int
    waiting: int  # requests that wait for it
    expires_at: float | None  # None: it is in use, or stays
    loaded_at: float | None


class Event(Struct, frozen=True):
    """A change of a unit's state, or of its progress."""

    name: str
    state: State
    progress: Progress | None = None
    error: str | None = None
