"""The arrays of guesses: how their rows are sampled, and where their sequences' blocks are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..devices.batch import SamplingBatch
from ..scheduling.sampling_rows import sampling_batch
from ..scheduling.sequence import Sequence


class GuessRows:
    """Makes the sampling arrays of guesses, and keeps them as long as they are of the same sequences."""

    def __init__(self) -> None:
        self._last: tuple[list[Sequence], SamplingBatch] | None = None  # if they have no biases

    def sampling(self, sequences: list[Sequence], positions: NDArray[np.int32]) -> SamplingBatch:
        """A row of each sequence, for its token at that position [S]."""
        if self._last is not None and self._last[0] == sequences:
            sampling = self._last[1]
            sampling.position = positions
            return sampling
        sampling = sampling_batch([s.sampling for s in sequences], positions)
        self._last = None if any(s.sampling.has_bias for s in sequences) else (sequences, sampling)
        return sampling


def first_tables(sequences: list[Sequence]) -> NDArray[np.int32]:
    """The block tables of the first cache group, [S, blocks]."""
    if len(sequences) == 1:
        return sequences[0].block_tables[:1, : sequences[0].num_blocks]
    tables = np.zeros((len(sequences), max([s.num_blocks for s in sequences])), np.int32)
    for table, sequence in zip(tables, sequences, strict=True):
        table[: sequence.num_blocks] = sequence.block_tables[0, : sequence.num_blocks]
    return tables
