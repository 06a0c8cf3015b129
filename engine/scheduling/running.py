"""Running: the sequences that hold blocks, and what each of them is at."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq
from operator import attrgetter

from ..sequences.sequence import UNKNOWN, Sequence, SequenceState

_order, _adapter = attrgetter("order"), attrgetter("adapter")


class Running:
    """Those in prefill, by `Sequence.order`, and those that decode.

    `decode_version` changes with the decoding sequences and their biases.
    """

    def __init__(self) -> None:
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []  # replaced, never changed in place: steps refer to it
        self.decode_version = 0

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def sequences(self) -> list[Sequence]:
        """All of them."""
        return self.prefilling + self.decoding

    def last(self) -> Sequence:
        """The last in order, which is the first to make way. There must be one."""
        return max(self.sequences(), key=_order)

    def admit(self, sequence: Sequence) -> None:
        """Let a sequence that has blocks begin."""
        sequence.state = SequenceState.PREFILLING
        sequence.num_drafted = UNKNOWN
        insort(self.prefilling, sequence, key=_order)

    def start_decoding(self, sequences: Seq[Sequence]) -> None:
        """Go on with sequences that are computed up to their last token."""
        for sequence in sequences:
            if sequence.state is SequenceState.PREFILLING:
                self.prefilling.remove(sequence)
            sequence.state = SequenceState.DECODING
        # Sequences of one adapter are side by side: kernels share what they read of it.
        self.decoding = sorted([*self.decoding, *sequences], key=_adapter)
        self.decode_version += 1

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence in any state wait."""
        if sequence.state is SequenceState.PREFILLING:
            self.prefilling.remove(sequence)
        elif sequence.state is SequenceState.DECODING:
            self.decoding = [s for s in self.decoding if s is not sequence]
            self.decode_version += 1
        sequence.state = SequenceState.WAITING
