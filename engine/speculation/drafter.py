"""Drafter: what drafts tokens, and what it is shown of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..cache.identity import Identity
from ..devices.batch import TokenMasks
from ..sequences.sequence import Sequence
from .draft_costs import DraftCosts, StepPrices


class Draftable(Protocol):
    """A sequence as drafters see it: `key` names it, and its tokens are the first `num_tokens` of `tokens`.

    The prompt is the first `prompt_len` of them. Only sequences with the same `identity.root` may know of each other.
    """

    key: int
    tokens: NDArray[np.int32]
    num_tokens: int
    prompt_len: int
    identity: Identity


class Continued:
    """A sequence as drafters will see it once it goes on with some tokens that are almost certain."""

    def __init__(self, sequence: Draftable, more: list[int]) -> None:
        self.key = sequence.key
        self.prompt_len = sequence.prompt_len
        self.identity = sequence.identity
        self.num_tokens = sequence.num_tokens + len(more)
        self.tokens: NDArray[np.int32] = np.append(sequence.tokens[: sequence.num_tokens], np.array(more, np.int32))


class Drafter(Protocol):
    """Proposes how a sequence goes on."""

    def propose(self, sequence: Draftable) -> list[int]:
        """The likely next tokens of a sequence, of the model's vocabulary; none if it cannot tell.

        Called on the engine thread before every step that the sequence decodes in, if draft tokens may pay.
        """
        ...


@runtime_checkable
class RememberingDrafter(Drafter, Protocol):
    """A drafter that learns from sequences that have ended."""

    def ended(self, sequence: Draftable) -> None:
        """Called on the engine thread when a sequence ends, unless it was a beam."""
        ...

    def forget(self) -> None:
        """Forget the sequences that have ended."""
        ...


@runtime_checkable
class BatchDrafter(Protocol):
    """A drafter that drafts for all sequences of a step together, before the step, and remembers what it has read.

    It computes in the KV blocks of the sequences, where it has a cache beside that of the model. `num_tokens` is the
    most draft tokens of a sequence in a step, `costs` what its calls take.
    """

    num_tokens: int
    costs: DraftCosts

    def rooms(self, sequences: Seq[Sequence]) -> dict[Sequence, int]:
        """How many draft tokens each sequence may get; those that may get none are left out."""
        ...

    def ready(
        self, counts: Mapping[Sequence, int], saved_ms: float, num_accepted: float, prices: StepPrices
    ) -> dict[Sequence, int]:
        """Those of `counts` that can have their draft tokens in this step.

        Each draft is expected to save `saved_ms`, by `num_accepted` tokens.
        """
        ...

    def draft(
        self, counts: Mapping[Sequence, int], prices: StepPrices, masks: TokenMasks | None = None
    ) -> tuple[Mapping[Sequence, list[int]], float]:
        """At most `counts` draft tokens, no more than were planned, and how long they took, in milliseconds.

        The sequences have blocks for them. `masks` say what the first draft token of each may be, in their order.
        Called after each plan, also with an empty one: it may have to catch up.
        """
        ...

    def learn(self, sequence: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        """Note how many of a sequence's draft tokens were accepted."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Note that a sequence has ended, whether it had draft tokens or not."""
        ...

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy KV blocks of the first cache group, `(from, to)`, before anything is drafted in them."""
        ...


@runtime_checkable
class CachingDrafter(BatchDrafter, Protocol):
    """One with its own KV cache beside the model's. Both are lost together."""

    def lose_cache(self) -> None:
        """Note that its cache is empty, and that all running sequences end."""
        ...
