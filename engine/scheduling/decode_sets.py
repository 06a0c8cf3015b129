"""DecodeSets: which decoding sequences share a step where several steps of different sequences run at a time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from collections.abc import Set
from operator import attrgetter

from ..sequences.sequence import Sequence
from .running import Running

_last_set = attrgetter("decode_set")


class DecodeSets:
    """Shares the decoding sequences out to `num_sets` steps, evenly.

    A set that runs again as it was keeps its number, so that its arrays are built once: see BatchBuilder.
    """

    def __init__(self, running: Running, num_sets: int) -> None:
        self._running, self._num_sets = running, num_sets
        self._number = 0
        self._sizes: dict[int, tuple[int, int]] = {}  # and the version of what runs, by the set's number
        self._moved: set[int] = set()  # keys of those whose block tables have changed since they last ran

    def choose(self) -> list[Sequence]:
        """The decodes of the next step: at most a fair share of all. Of those in no other step, the longest waiting."""
        decoding = self._running.decoding
        idle = [sequence for sequence in decoding if not sequence.in_flight]
        share = -(-len(decoding) // self._num_sets)
        if len(idle) <= share:
            return idle
        chosen = {sequence.key for sequence in sorted(idle, key=_last_set)[:share]}
        return [sequence for sequence in idle if sequence.key in chosen]

    def number(self, decodes: Seq[Sequence]) -> int:
        """The number of the set of these decodes, which run next. It stays the same if nothing about the set is new."""
        version = self._running.decode_version
        last = decodes[0].decode_set if decodes else 0
        if self._sizes.get(last) == (len(decodes), version) and all(s.decode_set == last for s in decodes):
            return last
        self._number += 1
        self._sizes = {number: known for number, known in self._sizes.items() if known[1] == version}
        self._sizes[self._number] = len(decodes), version
        for sequence in decodes:
            sequence.decode_set = self._number
        return self._number

    def moved(self, decodes: Seq[Sequence], keys: Set[int]) -> Set[int]:
        """Which of these have other block tables than when they last ran, `keys` being those that changed just now."""
        self._moved |= keys
        moved = self._moved & {sequence.key for sequence in decodes}
        self._moved -= moved
        return moved

    def forget(self, sequence: Sequence) -> None:
        """Note the end of a sequence."""
        self._moved.discard(sequence.key)
