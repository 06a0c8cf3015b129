"""SnapshotPlan: at which places a snapshot of a sequence's state is worth its memory.

A state is as large as the K and V of hundreds of tokens, and is known only where a step ends. Prompts come back with
more behind them (the next turn of a chat) or with something else behind a part (a system prompt, a document). So
lasting snapshots are at a prompt's end, where it differs from an earlier one or one that waits for it, and now and then
within a long prompt.
Between these, a sequence has one snapshot that moves along with it. After a preemption it goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .identity import Digest

SPACING_BLOCKS = 4  # computing so few again costs less than a step of its own or a copy
_LASTING_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """The plan for one sequence. Numbers are tokens, at block ends.

    Chunks of the prompt end at `stops`, and snapshots there last. `latest` and `lasting` are where the last snapshot of
    any kind, or of one that lasts, was taken or was found. `passing` is the one that the next replaces.
    """

    block_size: int = 1
    prompt_end: int = 0
    stops: tuple[int, ...] = ()
    latest: int = 0
    lasting: int = 0
    passing: Digest | None = None

    @classmethod
    def of(cls, num_tokens: int, num_cached: int, num_common: int, block_size: int) -> SnapshotPlan:
        """For a sequence of `num_tokens` that goes on after `num_cached`. It has `num_common` in common with others,
        so far as the cache knows their K and V.
        """
        end, spacing = (num_tokens - 1) // block_size * block_size, SPACING_BLOCKS * block_size
        stops = [num_cached]
        for stop in (num_common, end):
            if stop - stops[-1] >= spacing:
                stops.append(stop)
        return cls(block_size, end, tuple(stops[1:]), num_cached, num_cached)

    def chunk(self, start: int, num_tokens: int) -> int:
        """How many of the next `num_tokens` from `start` on a step computes: it ends at the first stop on the way."""
        return next((stop - start for stop in self.stops if start < stop < start + num_tokens), num_tokens)

    def lasts(self, at: int) -> bool:
        """Whether a snapshot of the state after `at` tokens is to last."""
        return at in self.stops or (at < self.prompt_end and at - self.lasting >= _LASTING_BLOCKS * self.block_size)

    def passes(self, at: int) -> bool:
        """Whether one that does not last is due."""
        return at - self.latest >= SPACING_BLOCKS * self.block_size

    def next_after(self, at: int) -> int:
        """The first block end after `at` where one is due that does not last. Only a step that ends there takes it."""
        size = self.block_size
        return max((at // size + 1) * size, self.latest + SPACING_BLOCKS * size)

    def taken(self, at: int, passing: Digest | None = None) -> SnapshotPlan:
        """The plan after a snapshot: one that lasts, or one that is `passing`."""
        if passing is None:
            return replace(self, latest=at, lasting=at)
        return replace(self, latest=at, passing=passing)

    def forked(self) -> SnapshotPlan:
        """The plan of a sequence that goes on from the same state; what passes on stays the other's."""
        return replace(self, passing=None)
