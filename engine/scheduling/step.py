"""Step: what the scheduler chose to run next, and what of it samples."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from ..outputs import FinishReason
from .beam_search import Hypothesis
from .cost_model import StepLoad
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` tokens of a sequence in prefill. The one that reaches the last token samples a new one.

    So does each of `forks`, from the same logits: choices that share this prompt and go on from its end. Of the tokens
    that follow one of the chunk's in the prompt, the last `num_scored` get their log-probabilities. The prompt of the
    choices in `started` is computed with this chunk, for the first time.
    """

    sequence: Sequence
    num_tokens: int
    num_scored: int = 0
    forks: Seq[Sequence] = ()
    started: Seq[Sequence] = ()

    @property
    def is_last(self) -> bool:
        """Whether the sequence is computed up to its last token after this chunk."""
        return self.sequence.num_computed + self.num_tokens == self.sequence.num_tokens

    def sampled(self) -> list[Sequence]:
        """The sequences that get a token from this chunk; none if the prompt was all that was wanted."""
        sequence = self.sequence
        return [sequence, *self.forks] if self.is_last and sequence.num_tokens < sequence.max_length else []

    @property
    def scored(self) -> range:
        """The positions of the tokens whose successors get their log-probabilities."""
        sequence = self.sequence
        end = min(sequence.num_computed + self.num_tokens, sequence.prompt_len - 1)
        return range(end - self.num_scored, end)


@dataclass(slots=True)
class Step:
    """What runs next: one token of each of `decodes`, then the chunks.

    As long as `decode_version` stays the same, so do the decoding sequences, their order and their biases;
    `moved` are the rows of `decodes` whose block tables have changed since. `copies` are KV blocks, `(from, to)`, to
    be copied before the step runs. `preempted` are the keys of sequences that had to make way for it.
    """

    decodes: list[Sequence] = field(default_factory=list)
    decode_version: int = 0
    moved: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    load: StepLoad = field(default_factory=StepLoad)

    @property
    def num_starting(self) -> int:
        """Forks that will run after this step and do not yet."""
        return sum([len(chunk.forks) for chunk in self.chunks])

    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the step's first rows. Those of scored tokens follow."""
        if not self.chunks:
            return self.decodes
        return [*self.decodes, *(sequence for chunk in self.chunks for sequence in chunk.sampled())]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of the sequence `key`. `stop_reason` is the stop token that ended it, None for end of sequence.

    `is_complete`: its last token belongs to the text, after which its grammar allows no other. The `hypothesis` of a
    search is all that the sequence's choice is to have.
    """

    key: int
    reason: FinishReason
    stop_reason: int | None = None
    error: str | None = None
    is_complete: bool = False
    hypothesis: Hypothesis | None = None
