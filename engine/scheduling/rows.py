"""StepRows: whose the tokens of a step are, and whose the rows of logits that are sampled or scored."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..constraints.constraint import SequenceConstraint
from ..constraints.lookahead import Lookahead
from ..sequences.sequence import Sequence


class Chunk(Struct, frozen=True):
    """The next tokens of a sequence in prefill, from position `start` on.

    The logits after the last one are sampled once for each sequence in `sampling`: if the chunk is the last one of its
    sequence, for that and for forks that go on from the end of its prompt. Log-probabilities are wanted of the
    `num_scored` tokens that follow the chunk's last ones in the prompt. The prompt of the choices in `started` has
    now been computed for the first time. One that `counts_early` has no rows, and its sequence goes on before the step
    has ended.
    """

    sequence: Sequence
    start: int
    tokens: slice  # of the step's
    sampling: Seq[Sequence]
    sampled: slice  # of the step's rows, one for each of `sampling`
    num_scored: int
    first_scored: int  # of the step's scored rows
    started: Seq[Sequence]
    counts_early: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that it runs."""
        length: int = self.tokens.stop - self.tokens.start
        return length

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.num_tokens

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The tokens that it runs."""
        return self.sequence.tokens[self.start : self.end]

    @property
    def sampled_after(self) -> Seq[int]:
        """The step's token before each of the sampled rows."""
        return [self.tokens.stop - 1] * len(self.sampling)

    @property
    def scored(self) -> range:
        """The positions of the tokens whose successors get their log-probabilities."""
        end = min(self.end, self.sequence.prompt_len - 1)
        return range(end - self.num_scored, end)


class Draft(Struct):
    """A decode that runs its last token, at position `start`, and draft tokens behind it. One is sampled after each.

    A draft token is right if it is the token that was sampled before it. What was sampled after a wrong one is not
    used, nor what was sampled in rows that the `lookahead` of a constraint has not reached.
    """

    sequence: Sequence
    start: int
    token_ids: list[int]  # the last token, then the draft tokens
    tokens: slice  # of the step's
    sampled: slice  # of the step's rows, one after each token
    lookahead: Lookahead | None = None
    _num_kept: int = 0  # once it is known

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.token_ids)

    @property
    def sampled_after(self) -> Seq[int]:
        """The step's token before each of the sampled rows."""
        return range(self.tokens.start, self.tokens.stop)

    @property
    def histories(self) -> list[NDArray[np.int32]]:
        """The tokens before the one that each row samples:

        those of the sequence, and the draft tokens before the row.
        """
        tokens = np.append(self.sequence.tokens[: self.start], np.array(self.token_ids, np.int32))
        return [tokens[: self.start + i] for i in range(1, len(self.token_ids) + 1)]

    def num_kept(self, token_ids: list[int]) -> int:
        """How many of the tokens that were sampled count, at least one. `token_ids` are those of the step's rows.

        With a lookahead, its masks must have been written.
        """
        if not self._num_kept:
            kept = 1
            for draft, token in zip(self.token_ids[1:], token_ids[self.sampled], strict=False):
                if draft != token:
                    break
                kept += 1
            self._num_kept = kept if self.lookahead is None else min(kept, self.lookahead.num_rows)
        return self._num_kept


class StepRows:
    """What a step runs, in order. Only this class says where each sequence's tokens and rows are.

    Tokens: one of each of `decodes`, then those of each of `drafts`, then those of each of `chunks`. Rows, each the
    logits after a token: one for each of `decodes`, then those that drafts sample, those that chunks sample, and those
    that chunks score. The first `num_sampled` rows are sampled, the other `num_scored` are scored.
    `has_beams`: some rows belong to beams, whose tokens are no sequence's before their search ends.
    """

    __slots__ = ("chunks", "decodes", "drafts", "has_beams", "num_sampled", "num_scored", "num_tokens")

    def __init__(self) -> None:
        self.decodes: Seq[Sequence] = ()
        self.drafts: list[Draft] = []
        self.chunks: list[Chunk] = []
        self.has_beams = False
        self.num_tokens = self.num_sampled = self.num_scored = 0

    def set_decodes(self, decodes: Seq[Sequence]) -> None:
        """Run the last token of these sequences. They come first: before anything is added."""
        self.decodes = decodes
        self.num_tokens = self.num_sampled = len(decodes)

    def add_draft(self, sequence: Sequence, draft_tokens: list[int], lookahead: Lookahead | None = None) -> None:
        """Run the last token of a sequence, and draft tokens behind it. They come before chunks.

        A sequence with a constraint needs the `lookahead` of these draft tokens.
        """
        token_ids = [sequence.last_token, *draft_tokens]
        tokens = slice(self.num_tokens, self.num_tokens + len(token_ids))
        sampled = slice(self.num_sampled, self.num_sampled + len(token_ids))
        self.drafts.append(Draft(sequence, sequence.num_computed, token_ids, tokens, sampled, lookahead))
        self.num_tokens, self.num_sampled = tokens.stop, sampled.stop

    def add_chunk(
        self,
        sequence: Sequence,
        num_tokens: int,
        *,
        num_scored: int = 0,
        sampling: Seq[Sequence] = (),
        started: Seq[Sequence] = (),
        counts_early: bool = False,
    ) -> None:
        """Run the next tokens of a sequence in prefill."""
        tokens = slice(self.num_tokens, self.num_tokens + num_tokens)
        sampled = slice(self.num_sampled, self.num_sampled + len(sampling))
        self.chunks.append(
            Chunk(
                sequence,
                sequence.num_computed,
                tokens,
                sampling,
                sampled,
                num_scored,
                self.num_scored,
                started,
                counts_early,
            )
        )
        self.num_tokens, self.num_sampled = tokens.stop, sampled.stop
        self.num_scored += num_scored

    def __bool__(self) -> bool:
        """Whether anything runs."""
        return self.num_tokens > 0

    @property
    def num_starting(self) -> int:
        """Forks that will run after this step and do not yet."""
        return sum([len(chunk.sampling) - 1 for chunk in self.chunks if chunk.sampling])

    @property
    def num_rows(self) -> int:
        """All rows of the step."""
        return self.num_sampled + self.num_scored

    @property
    def sampled(self) -> Seq[Sequence]:
        """Whose token each of the sampled rows gives."""
        if not self.spans:
            return self.decodes
        owners, counts = self.owners
        return [sequence for sequence, count in zip(owners, counts, strict=True) for _ in range(count)]

    @property
    def owners(self) -> tuple[list[Sequence], list[int]]:
        """Whose the sampled rows are, in order, and how many rows each has."""
        owners, counts = list(self.decodes), [1] * len(self.decodes)
        for draft in self.drafts:
            owners.append(draft.sequence)
            counts.append(len(draft.token_ids))
        for chunk in self.chunks:
            owners += chunk.sampling
            counts += [1] * len(chunk.sampling)
        return owners, counts

    @property
    def constraints(self) -> list[SequenceConstraint | None]:
        """The constraint of each sampled row that is not after draft tokens."""
        constraints = [sequence.constraint for sequence in self.sampled]
        for draft in self.drafts:
            constraints[draft.sampled.start + 1 : draft.sampled.stop] = [None] * (len(draft.token_ids) - 1)
        return constraints

    @property
    def lookaheads(self) -> list[tuple[int, Lookahead]]:
        """The lookaheads that find the masks of rows after draft tokens, each with the first row of its draft."""
        return [(draft.sampled.start, draft.lookahead) for draft in self.drafts if draft.lookahead is not None]

    @property
    def spans(self) -> list[Draft | Chunk]:
        """Those who may run more than one token, in order."""
        return [*self.drafts, *self.chunks]

    @property
    def sequences(self) -> list[Sequence]:
        """Who runs, in order of the tokens."""
        return [*self.decodes, *(span.sequence for span in self.spans)]

    def kept(self, token_ids: list[int]) -> list[tuple[Sequence, int]]:
        """The tokens that sequences got: without rows after a rejected draft token, and without beams.

        `token_ids` are those of the step's rows.
        """
        kept = list(zip(self.decodes, range(len(self.decodes)), strict=True))
        for draft in self.drafts:
            first = draft.sampled.start
            kept += [(draft.sequence, row) for row in range(first, first + draft.num_kept(token_ids))]
        for chunk in self.chunks:
            kept += zip(chunk.sampling, range(chunk.sampled.start, chunk.sampled.stop), strict=True)
        return [owned for owned in kept if owned[0].search is None] if self.has_beams else kept

    def newest(self, token_ids: list[int]) -> Iterable[tuple[Sequence, int]]:
        """The last token that each sequence got, beams left out. `token_ids` are those of the step's rows."""
        if self.drafts or self.has_beams:
            return [(sequence, token_ids[row]) for sequence, row in dict(self.kept(token_ids)).items()]
        return zip(self.sampled, token_ids, strict=False)  # scored rows follow

    def scored(self, chunk: Chunk) -> slice:
        """The rows that a chunk scores, one for each of `chunk.scored`."""
        first = self.num_sampled + chunk.first_scored
        return slice(first, first + chunk.num_scored)
