"""Beams: the sequences that compute the beams of each search."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import zip_longest

from ..cache.manager import CacheManager
from ..devices.batch import StepOutput
from ..devices.sampling import NO_TOKEN
from ..sequences.beam_search import BeamSearch, Growth, Hypothesis
from ..sequences.sequence import Sequence
from .rows import StepRows
from .running import Running


class _Group:
    """The `width` sequences of a search. `live` are those that compute beams now, the likeliest first."""

    def __init__(self, search: BeamSearch, sequences: Seq[Sequence]) -> None:
        self.search = search
        self.sequences = sequences
        self.start()

    def start(self) -> None:
        """Begin, or begin again, from the prompt, which the first sequence computes."""
        first = self.sequences[0]
        self.search.start(first.prompt_len, first.max_length - first.prompt_len)
        self.live = [first]

    def grow(self, beams: list[Growth]) -> list[tuple[Sequence, Sequence]]:
        """Let `live` be the sequences of the next step's beams, each with the one that it goes on from.

        One of a beam's children stays with the beam's own sequence; others go to those that have become free.
        """
        before = self.live
        kept = {before[beam.parent].key for beam in beams}
        free = [sequence for sequence in self.sequences if sequence.key not in kept]
        moves: list[tuple[Sequence, Sequence]] = []
        for beam in beams:
            parent = before[beam.parent]
            moves.append((parent if parent.key in kept else free.pop(), parent))
            kept.discard(parent.key)
        self.live = [sequence for sequence, _ in moves]
        return moves


class Beams:
    """All searches that have not ended. The beams of one run in the same steps, and are preempted together."""

    def __init__(self, cache: CacheManager, running: Running) -> None:
        self._cache = cache
        self._running = running
        self._groups: dict[BeamSearch, _Group] = {}
        self._active: list[_Group] = []  # those that hold blocks

    @property
    def are_running(self) -> bool:
        """Whether any of the sequences that run are beams."""
        return bool(self._active)

    @property
    def num_idle(self) -> int:
        """Sequences that compute no beam at present, of the searches that run. They may be needed any time."""
        return sum([len(group.sequences) - len(group.live) for group in self._active])

    def add(self, search: BeamSearch, sequences: Seq[Sequence]) -> None:
        """Take up a search. The first sequence is to compute the prompt."""
        self._groups[search] = _Group(search, sequences)

    def sequences(self, search: BeamSearch) -> Seq[Sequence]:
        """All sequences of a search, the first one first."""
        return self._groups[search].sequences

    def live(self, search: BeamSearch) -> list[Sequence]:
        """Those that compute beams, the likeliest first."""
        return self._groups[search].live

    def admit(self, search: BeamSearch) -> None:
        """The first sequence of a search begins."""
        self._active.append(self._groups[search])

    def restart(self, search: BeamSearch) -> Sequence:
        """Go back to the prompt, for lack of blocks. Returns the sequence that is to compute it."""
        group = self._groups[search]
        self._active.remove(group)
        group.start()
        first = group.sequences[0]
        first.rewind()
        return first

    def leave(self, search: BeamSearch) -> None:
        """Forget a search: all its sequences end together."""
        group = self._groups.pop(search, None)
        if group in self._active:
            self._active.remove(group)

    def advance(self, rows: StepRows, output: StepOutput) -> list[tuple[Sequence, Hypothesis | None]]:
        """Let each search take in the rows of its beams. Returns the ends of finished searches, sequence by sequence.

        Results belong to the first sequences. None is an error: the model gave too few tokens that may follow.
        """
        row_of = {beam.key: row for row, beam in enumerate(rows.sampled) if beam.search is not None}
        ends: list[tuple[Sequence, Hypothesis | None]] = []
        for group in self._active:
            if group.live[0].key not in row_of:
                continue
            at = [row_of[beam.key] for beam in group.live]
            if (output.token_ids[at] == NO_TOKEN).any():
                ends += [(sequence, None) for sequence in group.sequences]
                continue
            assert output.top_ids is not None
            assert output.top_logprobs is not None
            count = group.search.num_candidates
            beams = group.search.advance(output.top_ids[at, :count], output.top_logprobs[at, :count])
            if beams:
                self._grow(group, beams)
            else:
                ends += list(zip_longest(group.sequences, group.search.results))
        return ends

    def _grow(self, group: _Group, beams: list[Growth]) -> None:
        before = group.live
        moves = group.grow(beams)
        for sequence, parent in moves:
            if sequence is not parent:
                self._cache.fork(parent, sequence)
                sequence.become(parent)
        for sequence, beam in zip(group.live, beams, strict=True):
            sequence.append(beam.token)
        were, are = {s.key for s in before}, {s.key for s in group.live}
        for sequence in before:
            if sequence.key not in are:
                self._cache.release(sequence)
                self._running.remove(sequence)
        if starting := [s for s in group.live if s.key not in were]:
            self._running.start_decoding(starting)
