"""Drafter: what guesses at tokens to come, and what it is shown of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..cache.identity import Identity
from .sequence import Sequence


class Draftable(Protocol):
    """A sequence as drafters see it: `key` names it, and its tokens are the first `num_tokens` of `tokens`.

    The prompt is the first `prompt_len` of them. Only sequences with the same `identity.root` may know of each other.
    """

    key: int
    tokens: NDArray[np.int32]
    num_tokens: int
    prompt_len: int
    identity: Identity


class Drafter(Protocol):
    """Guesses how sequences go on."""

    def propose(self, sequence: Draftable) -> list[int]:
        """The likely next tokens of a sequence, of the model's vocabulary; none if it has no idea.

        Called on the engine thread before every step that the sequence decodes in, if guesses may pay.
        """
        ...


@runtime_checkable
class RememberingDrafter(Drafter, Protocol):
    """One that learns from the sequences that have ended."""

    def ended(self, sequence: Draftable) -> None:
        """Called on the engine thread when a sequence ends that was no beam."""
        ...

    def forget(self) -> None:
        """Know nothing of the sequences that have ended."""
        ...


class StepPrices(Struct, frozen=True):
    """What a step of `num_sequences` decodes takes without guesses, in milliseconds, and with each row more.

    `spare_ms` is how long it may be held up.
    """

    num_sequences: int
    plain_ms: float
    row_ms: float
    spare_ms: float

    @property
    def row_share(self) -> float:
        """What a row more costs, in tokens."""
        return self.row_ms * self.num_sequences / self.plain_ms if self.plain_ms > 0.0 else 0.0


@runtime_checkable
class BatchDrafter(Drafter, Protocol):
    """One that guesses for all sequences of a step together, in time of its own, and remembers what it has read.

    It computes in the KV blocks of the sequences, where it has a cache beside that of the model.
    """

    def plan(self, rates: Mapping[Sequence, float], prices: StepPrices) -> dict[Sequence, int]:
        """How many guesses each sequence should get, `rates` of which are right; those with none are left out.

        It begins a step, of which `propose` has nothing before `guess` was called.
        """
        ...

    def guess(self, counts: Mapping[Sequence, int], prices: StepPrices) -> None:
        """Make at most so many guesses, no more than were planned. The sequences have blocks for them."""
        ...

    def learn(self, sequence: Sequence, num_guesses: int, num_right: int) -> None:
        """Hear what became of a sequence's draft."""
        ...

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy KV blocks of the first cache group, `(from, to)`, before anything is guessed in them."""
        ...
