"""MemoryBudget: the memory that all loaded models share."""

from __future__ import annotations

import sys

from ..machine.memory import read_memory

DEFAULT_SHARE = 0.8
"""Of the memory that is available: the rest is for requests, and for others on the machine."""


class MemoryBudget:
    """Counts what is taken of an amount. It never lends more than there is."""

    def __init__(self, total_bytes: int | None) -> None:
        """None: as much as is asked for, where the system does not say how much there is."""
        self.total_bytes = total_bytes
        self.used_bytes = 0

    @classmethod
    def of_available(cls, share: float = DEFAULT_SHARE) -> MemoryBudget:
        """A share of what is available now. Page cache that can be dropped counts as available."""
        available = read_memory().available
        return cls(None if available is None else int(available * share))

    @property
    def free_bytes(self) -> int:
        """What may still be taken."""
        return (sys.maxsize if self.total_bytes is None else self.total_bytes) - self.used_bytes

    def take(self, num_bytes: int) -> None:
        """Take some. Raises MemoryError if there is less."""
        if num_bytes > self.free_bytes:
            raise MemoryError(f"{num_bytes} bytes wanted, {self.free_bytes} of {self.total_bytes} free")
        self.used_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Give back what was taken. Raises ValueError if more is given back than was taken."""
        if num_bytes > self.used_bytes:
            raise ValueError(f"{num_bytes} bytes given back, {self.used_bytes} taken")
        self.used_bytes -= num_bytes
