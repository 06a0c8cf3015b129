"""Decodes: the sequences that decode in a step, and their drafts."""

from __future__ import annotations

from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq

from ..cache.manager import CacheManager
from ..cost_model import StepLoad
from ..sequences.sequence import Sequence
from ..speculation.drafts import Drafts, DraftTokens
from .decode_sets import DecodeSets
from .preemption import Preemption
from .running import Running
from .step import Step


class Decodes:
    """Adds to steps the sequences that decode, each with room for its next token, and `drafts` of the tokens behind it.

    `num_constrained` of the sequences that have not ended have a constraint, and `num_searching` are beams.
    """

    def __init__(
        self,
        cache: CacheManager,
        max_in_flight: int,
        drafts: Drafts | None,
        *,
        running: Running,
        preemption: Preemption,
    ) -> None:
        self.drafts = drafts
        self.num_constrained = self.num_searching = 0
        self._cache = cache
        self._max_in_flight = max_in_flight
        self._running = running
        self._preemption = preemption
        self._sets = DecodeSets(running, max_in_flight)
        self._drafted: set[int] = set()  # keys of sequences that had a draft in the last step

    def added(self, sequence: Sequence) -> None:
        """Note a sequence that is to run."""
        self.num_constrained += sequence.constraint is not None
        self.num_searching += sequence.search is not None

    def ended(self, sequence: Sequence) -> None:
        """Note the end of a sequence."""
        self.num_constrained -= sequence.constraint is not None
        self.num_searching -= sequence.search is not None
        self._sets.forget(sequence)
        if self.drafts is not None:
            self.drafts.ended(sequence)

    def add(self, step: Step) -> None:
        """One token of every decoding sequence, each with room for it in a block of its own, and drafts."""
        block_size, decoding = self._cache.block_size, self._decoding()
        if not decoding and self._max_in_flight > 1:
            return
        short = [s for s in decoding if s.num_tokens > s.num_blocks * block_size]
        moved: Set[int] = frozenset()
        if short or self._cache.has_changed:
            moved = self._preemption.make_room(step, self._decoding)
            decoding = self._decoding()
        step.load = StepLoad(len(decoding), sum([s.num_tokens for s in decoding]))
        drafts: Mapping[Sequence, DraftTokens] = {}
        if self.drafts is not None and (self.drafts.has_drafter or self.num_constrained):
            self.drafts.copy_blocks(step.copies.get(0, ()))
            drafts = self.drafts.choose(decoding, step.load, len(self._running))
            if drafts or self._drafted:
                if (drafted := {s.key for s in drafts}) != self._drafted:
                    self._drafted = drafted
                    self._running.decode_version += 1
                decoding = [s for s in decoding if s not in drafts]
            if self.drafts.extended:
                moved = moved | self.drafts.extended
        step.rows.set_decodes(decoding)
        for sequence, draft_tokens in drafts.items():
            step.rows.add_draft(sequence, draft_tokens.token_ids, draft_tokens.lookahead)
            step.load = step.load.plus_draft(sequence.num_tokens, len(draft_tokens.token_ids))
        step.decode_version = self._running.decode_version
        if self._max_in_flight > 1:
            moved, step.decode_version = self._sets.moved(decoding, moved), self._sets.number(decoding)
        if moved:
            step.moved = [row for row, sequence in enumerate(decoding) if sequence.key in moved]

    def _decoding(self) -> Seq[Sequence]:
        """Who decodes in the next step: all where it is the only one."""
        return self._running.decoding if self._max_in_flight == 1 or self.num_searching else self._sets.choose()
