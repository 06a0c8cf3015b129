"""StepRows: whose the tokens of a step are, and whose the rows of logits that are sampled or scored."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a sequence in prefill, from position `start` on.

    The logits after the last one are sampled once for each sequence in `sampling`: if the chunk is the last one of its
    sequence, for that and for forks that go on from the end of its prompt. Log-probabilities are wanted of the
    `num_scored` tokens that follow the chunk's last ones in the prompt. The prompt of the choices in `started` has
    now been computed for the first time.
    """

    sequence: Sequence
    start: int
    tokens: slice  # of the step's
    sampling: Seq[Sequence]
    sampled: slice  # of the step's rows, one for each of `sampling`
    num_scored: int
    first_scored: int  # of the step's scored rows
    started: Seq[Sequence]

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
    def scored(self) -> range:
        """The positions of the tokens whose successors get their log-probabilities."""
        end = min(self.end, self.sequence.prompt_len - 1)
        return range(end - self.num_scored, end)


class StepRows:
    """What a step runs, in order: the one place that says where whose tokens and rows are.

    Tokens: one of each of `decodes`, then those of each of `chunks`. Rows, each the logits after a token: one for each
    of `decodes`, then those that chunks sample, then those that they score. The first `num_sampled` rows are sampled,
    `num_scored` are scored. `has_beams`: some rows are beams', whose tokens are nobody's before their search ends.
    """

    __slots__ = ("chunks", "decodes", "has_beams", "num_sampled", "num_scored", "num_tokens")

    def __init__(self) -> None:
        self.decodes: Seq[Sequence] = ()
        self.chunks: list[Chunk] = []
        self.has_beams = False
        self.num_tokens = self.num_sampled = self.num_scored = 0

    def set_decodes(self, decodes: Seq[Sequence]) -> None:
        """Run the last token of these sequences. They come first: before anything is added."""
        self.decodes = decodes
        self.num_tokens = self.num_sampled = len(decodes)

    def add_chunk(
        self,
        sequence: Sequence,
        num_tokens: int,
        *,
        num_scored: int = 0,
        sampling: Seq[Sequence] = (),
        started: Seq[Sequence] = (),
    ) -> None:
        """Run the next tokens of a sequence in prefill."""
        tokens = slice(self.num_tokens, self.num_tokens + num_tokens)
        sampled = slice(self.num_sampled, self.num_sampled + len(sampling))
        self.chunks.append(
            Chunk(sequence, sequence.num_computed, tokens, sampling, sampled, num_scored, self.num_scored, started)
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
        if not self.chunks:
            return self.decodes
        return [*self.decodes, *(sequence for chunk in self.chunks for sequence in chunk.sampling)]

    @property
    def sequences(self) -> list[Sequence]:
        """Who runs, in order of the tokens."""
        return [*self.decodes, *(chunk.sequence for chunk in self.chunks)]

    def scored(self, chunk: Chunk) -> slice:
        """The rows that a chunk scores, one for each of `chunk.scored`."""
        first = self.num_sampled + chunk.first_scored
        return slice(first, first + chunk.num_scored)
