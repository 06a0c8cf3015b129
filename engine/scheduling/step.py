"""Step: what the scheduler chose to run next, and how what runs ends."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from msgspec import Struct

from ..cost_model import StepLoad
from ..outputs import FinishReason
from ..sequences.beam_search import Hypothesis
from .rows import StepRows


@dataclass(slots=True)
class Step:
    """What runs next.

    As long as `decode_version` stays the same, so do the `rows.decodes`, their order and their biases; `moved` are the
    indices of those whose block tables have changed since. `copies` are KV blocks, `(from, to)` by cache group, and
    `state_copies` slots of recurrent state, one after the other, to be copied before the step runs. `preempted` are the
    keys of sequences that had to make way for it. One that `is_async` was made
    before the tokens of the step before it were known.
    """

    rows: StepRows = field(default_factory=StepRows)
    decode_version: int = 0
    moved: list[int] = field(default_factory=list)
    copies: Mapping[int, Seq[tuple[int, int]]] = field(default_factory=dict)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    load: StepLoad = field(default_factory=StepLoad)
    is_async: bool = False


class Finished(Struct, frozen=True):
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
