"""What a step's programs get from the host, padded to their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..batch import SamplingBatch, StepBatch
from ..sampling import philox_uniform

ScalarT = TypeVar("ScalarT", bound=np.generic)
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class StepInputs(NamedTuple):
    """A batch of at most S sequences and T tokens. Tuples have an entry for each cache group.

    `slots` say where K and V of a token go, counted over all pages. The slots of padding lie behind the last page;
    nothing is written there.
    """

    token_ids: Ints  # [T]
    last_row: Ints  # [T]; the row of the last step that has sampled the token, -1: it is in `token_ids`
    positions: Ints  # [T]; 0 for padding
    sequence: Ints  # [T]; the sequence of each token
    slots: tuple[Ints, ...]  # [T]
    tables: tuple[Ints, ...]  # [S, W]
    query_start: Ints  # [S + 1]
    context_len: Ints  # [S]
    num_seqs: Ints  # [1]
    state_slots: Ints  # [S]; where recurrent mixers keep what they know of a sequence
    adapter: Ints  # [T]; the slot of each token's adapter, -1: none


class RowInputs(NamedTuple):
    """Rows whose tokens are sampled, padded to R. `uniform` is the number in [0, 1) that a seeded row draws with."""

    tokens: Ints  # [R]; indices into the step's tokens
    temperature: Floats  # [R]
    top_k: Ints  # [R]
    top_p: Floats  # [R]
    min_p: Floats  # [R]
    uniform: Floats  # [R]
    adapter: Ints  # [R]; the slot of each row's adapter, -1: none


def step_inputs(
    batch: StepBatch,
    num_tokens: int,
    num_seqs: int,
    width: int,
    padding: Sequence[int],
    page_size: int,
    padding_state: int = 0,
) -> StepInputs:
    """Copies of a batch's arrays, padded to `num_tokens`, `num_seqs`, and tables of `width` pages.

    `padding` has the padding page of each cache group, and `padding_state` is the slot of padding. The batch's
    `adapters` are slots.
    """
    count, sequences = len(batch.token_ids), len(batch.context_len)
    sequence = _sequences(batch)
    blocks, offsets = np.divmod(batch.positions, page_size)
    slots, tables = [], []
    for page, own in zip(padding, (batch.block_tables, *batch.window_tables), strict=True):
        table = np.full((num_seqs, width), page, np.int32)
        columns = min(width, own.shape[1])
        table[:sequences, :columns] = own[:, :columns]
        written = np.full(num_tokens, (page + 1) * page_size, np.int32)
        written[:count] = table[sequence, blocks] * page_size + offsets
        slots.append(written)
        tables.append(table)
    last_row = np.arange(count, dtype=np.int32) if batch.is_async else np.full(count, -1, np.int32)
    return StepInputs(
        _padded(batch.token_ids, num_tokens),
        _padded(last_row, num_tokens, -1),
        _padded(batch.positions, num_tokens),
        _padded(sequence, num_tokens),
        tuple(slots),
        tuple(tables),
        _padded(batch.query_start, num_seqs + 1, count),
        _padded(batch.context_len, num_seqs),
        np.array([sequences], np.int32),
        _padded(np.empty(0, np.int32) if batch.state_slots is None else batch.state_slots, num_seqs, padding_state),
        _padded(np.empty(0, np.int32) if batch.adapters is None else batch.adapters[sequence], num_tokens, -1),
    )


def row_inputs(batch: StepBatch, rows: NDArray[np.intp], num_rows: int) -> RowInputs:
    """The inputs of the batch's `rows`, padded to `num_rows` with greedy rows."""
    sampling: SamplingBatch = batch.sampling
    temperature = sampling.temperature[rows]
    uniform = np.zeros(num_rows, np.float32)
    for i in np.flatnonzero(temperature).tolist():
        uniform[i] = philox_uniform(int(sampling.seed[rows[i]]), int(sampling.position[rows[i]]))
    return RowInputs(
        _padded(batch.logits_rows[rows], num_rows),
        _padded(temperature, num_rows),
        _padded(sampling.top_k[rows], num_rows),
        _padded(sampling.top_p[rows], num_rows, 1),
        _padded(sampling.min_p[rows], num_rows),
        uniform,
        _padded(
            np.empty(0, np.int32)
            if batch.adapters is None
            else batch.adapters[_sequences(batch)[batch.logits_rows[rows]]],
            num_rows,
            -1,
        ),
    )


def _sequences(batch: StepBatch) -> Ints:
    """The sequence of each token, [T]."""
    return np.repeat(np.arange(len(batch.context_len), dtype=np.int32), np.diff(batch.query_start))


def _padded(array: NDArray[ScalarT], size: int, value: float = 0) -> NDArray[ScalarT]:
    padded = np.full(size, value, array.dtype)
    padded[: len(array)] = array
    return padded
