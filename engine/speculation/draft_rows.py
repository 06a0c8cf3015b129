"""The arrays of draft tokens: how their rows are sampled, and where their sequences' blocks are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..devices.batch import SamplingBatch
from ..sequences.sampling_rows import sampling_batch, set_history
from ..sequences.sequence import Sequence


class DraftRows:
    """Makes the sampling arrays of draft tokens, and keeps them as long as the sequences are the same."""

    def __init__(self) -> None:
        self._last: tuple[list[Sequence], SamplingBatch] | None = None  # if they have no biases and no penalties

    def sampling(self, sequences: list[Sequence], positions: NDArray[np.int32]) -> SamplingBatch:
        """A row for each sequence: it samples the sequence's next token, at that position [S]."""
        if self._last is not None and self._last[0] == sequences:
            sampling = self._last[1]
            sampling.position = positions
            return sampling
        rows = [s.sampling for s in sequences]
        sampling = sampling_batch(rows, positions)
        if any(row.uses_history for row in rows):
            set_history(sampling, [s.tokens[: s.num_tokens if s.sampling.uses_history else 0] for s in sequences])
            self._last = None
        else:
            self._last = None if any(row.has_bias for row in rows) else (sequences, sampling)
        return sampling


def first_tables(sequences: list[Sequence]) -> NDArray[np.int32]:
    """The block tables of the first cache group, [S, blocks]."""
    if len(sequences) == 1:
        return sequences[0].block_tables[:1, : sequences[0].num_blocks]
    tables = np.zeros((len(sequences), max([s.num_blocks for s in sequences])), np.int32)
    for table, sequence in zip(tables, sequences, strict=True):
        table[: sequence.num_blocks] = sequence.block_tables[0, : sequence.num_blocks]
    return tables
