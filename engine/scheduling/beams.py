"""Beams: which sequences compute the beams of which search."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .beam_search import BeamSearch
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Move:
    """A beam's next token. Its sequence goes on from where `parent` is: itself, or one whose place it takes."""

    sequence: Sequence
    parent: Sequence
    token: int


class Beams:
    """A search and its `width` sequences. `live` are those that compute beams now, the likeliest first."""

    def __init__(self, search: BeamSearch, sequences: Seq[Sequence]) -> None:
        self.search = search
        self.sequences = sequences
        self.start()

    def start(self) -> None:
        """Begin, or begin again, from the prompt, which the first sequence computes."""
        first = self.sequences[0]
        self.search.start(first.prompt_len, first.max_length - first.prompt_len)
        self.live = [first]

    @property
    def num_idle(self) -> int:
        """Sequences that compute no beam at present."""
        return len(self.sequences) - len(self.live)

    def advance(self, top_ids: NDArray[np.int32], top_logprobs: NDArray[np.float32]) -> list[Move]:
        """Take in the likeliest tokens after each live beam, both `[len(live), num_candidates]`.

        Returns the next token of each beam, and `live` are now their sequences; nothing if the search is over.
        One of a beam's children is computed by the beam's own sequence, others by those that have become free.
        """
        grown, before = self.search.advance(top_ids, top_logprobs), self.live
        if not grown:
            return []
        kept = {before[growth.parent].key for growth in grown}
        free = [sequence for sequence in self.sequences if sequence.key not in kept]
        moves: list[Move] = []
        for growth in grown:
            parent = before[growth.parent]
            moves.append(Move(parent if parent.key in kept else free.pop(), parent, growth.token))
            kept.discard(parent.key)
        self.live = [move.sequence for move in moves]
        return moves
