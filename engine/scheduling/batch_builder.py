"""BatchBuilder: the scheduler's step as the flat arrays a device gets.

Decoding one token each for a few dozen sequences is what the engine does most of the time, thousands of times a
second. So the arrays of an unchanged set of decoding sequences are kept, and a step only refreshes what moves.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..devices.batch import SamplingBatch, StepBatch, TokenMasks
from .sequence import Sequence
from .step import Chunk, Step

Scalar = TypeVar("Scalar", np.int32, np.float32)

_TABLE_ROOM = 8  # block table columns kept free, so that growing sequences rarely make a new table


class BatchBuilder:
    """Builds one StepBatch at a time. A batch is valid until the next one is built."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._decodes = _empty_batch()
        self._uses_history = False

    def build(self, step: Step, masks: TokenMasks | None = None) -> StepBatch:
        """The arrays of `step`: decodes first, then chunks. `masks` are for the rows of `step.sampled()`."""
        decodes = self._decode_batch(step)
        if not step.chunks:
            decodes.sampling.masks = masks
            return decodes
        sequences = [*step.decodes, *(chunk.sequence for chunk in step.chunks)]
        num_decodes = len(step.decodes)
        lengths = np.ones(len(sequences), dtype=np.int32)
        lengths[num_decodes:] = [chunk.num_tokens for chunk in step.chunks]
        query_start = np.zeros(len(sequences) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_start[1:])
        token_ids, positions = [decodes.token_ids], [decodes.positions]
        for chunk in step.chunks:
            start = chunk.sequence.num_computed
            end = start + chunk.num_tokens
            token_ids.append(chunk.sequence.tokens[start:end])
            positions.append(np.arange(start, end, dtype=np.int32))
        rows = np.ones(len(sequences), dtype=np.int32)
        rows[num_decodes:] = [len(chunk.sampled()) for chunk in step.chunks]
        logits_rows = np.repeat(query_start[1:] - 1, rows)
        sampling = _sampling(step.sampled()) if rows[num_decodes:].any() else decodes.sampling
        sampling.masks = masks
        if step.load.scored_tokens:
            starts = query_start[num_decodes:-1].tolist()
            scored = [(chunk, start) for chunk, start in zip(step.chunks, starts, strict=True) if chunk.num_scored]
            logits_rows = np.concatenate([logits_rows, *(_scored_rows(chunk, start) for chunk, start in scored)])
            sampling = _with_scored(sampling, [chunk for chunk, _ in scored])
        return StepBatch(
            token_ids=np.concatenate(token_ids),
            positions=np.concatenate(positions),
            query_start=query_start,
            context_len=np.concatenate([decodes.context_len, [int(p[-1]) + 1 for p in positions[1:]]], dtype=np.int32),
            block_tables=_block_tables(sequences),
            logits_rows=logits_rows,
            sampling=sampling,
        )

    def _decode_batch(self, step: Step) -> StepBatch:
        batch, sequences = self._decodes, step.decodes
        count = len(sequences)
        if step.decode_version != self._version:
            self._decodes = batch = _empty_batch(count)
            batch.positions[:] = [sequence.num_computed for sequence in sequences]
            np.add(batch.positions, 1, out=batch.context_len)
            batch.block_tables = _block_tables(sequences, room=_TABLE_ROOM)
            batch.sampling = _sampling(sequences)
            batch.sampling.position = batch.context_len  # the same array: a token is sampled where the context ends
            self._version = step.decode_version
            self._uses_history = any(sequence.uses_history for sequence in sequences)
        else:
            self._refresh_tables(batch, step)
            batch.positions += 1
            batch.context_len += 1
        batch.token_ids[:] = [sequence.last_token for sequence in sequences]
        if self._uses_history:
            _set_history(batch.sampling, sequences)
        return batch

    @staticmethod
    def _refresh_tables(batch: StepBatch, step: Step) -> None:
        width = batch.block_tables.shape[1]
        for row in step.moved:
            sequence = step.decodes[row]
            blocks = sequence.num_blocks
            if blocks > width:
                batch.block_tables = _block_tables(step.decodes, room=_TABLE_ROOM)
                return
            batch.block_tables[row, :blocks] = sequence.block_table[:blocks]


def _empty_batch(count: int = 0) -> StepBatch:
    return StepBatch(
        token_ids=np.empty(count, dtype=np.int32),
        positions=np.empty(count, dtype=np.int32),
        query_start=np.arange(count + 1, dtype=np.int32),
        context_len=np.empty(count, dtype=np.int32),
        block_tables=np.zeros((count, 1), dtype=np.int32),
        logits_rows=np.arange(count, dtype=np.int32),
        sampling=_sampling([]),
    )


def _block_tables(sequences: list[Sequence], room: int = 0) -> NDArray[np.int32]:
    width = max([sequence.num_blocks for sequence in sequences], default=0) + room
    tables = np.zeros((len(sequences), width), dtype=np.int32)
    for row, sequence in enumerate(sequences):
        tables[row, : sequence.num_blocks] = sequence.block_table[: sequence.num_blocks]
    return tables


def _sampling(sequences: list[Sequence]) -> SamplingBatch:
    count = len(sequences)
    # One array a kind of number: its rows are contiguous arrays of one parameter each.
    floats = np.array([s.float_params for s in sequences], dtype=np.float32).reshape(count, 6).T.copy()
    ints = np.array([s.int_params for s in sequences], dtype=np.int32).reshape(count, 3).T.copy()
    bias_start = np.zeros(count + 1, dtype=np.int32)
    np.cumsum([len(s.bias_ids) for s in sequences], out=bias_start[1:])
    sampling = SamplingBatch(
        temperature=floats[0],
        top_p=floats[1],
        min_p=floats[2],
        repetition_penalty=floats[3],
        presence_penalty=floats[4],
        frequency_penalty=floats[5],
        top_k=ints[0],
        num_logprobs=ints[1],
        prompt_len=ints[2],
        seed=np.array([s.seed for s in sequences], dtype=np.uint64),
        position=np.array([s.num_tokens for s in sequences], dtype=np.int32),
        history_start=np.zeros(count + 1, dtype=np.int32),
        history_ids=np.empty(0, dtype=np.int32),
        bias_start=bias_start,
        bias_ids=_joined([s.bias_ids for s in sequences], np.int32),
        bias_values=_joined([s.bias_values for s in sequences], np.float32),
    )
    if any(s.logprob_temperature != 1.0 for s in sequences):
        sampling.logprob_temperature = np.array([s.logprob_temperature for s in sequences], dtype=np.float32)
    if any(s.uses_history for s in sequences):
        _set_history(sampling, sequences)
    return sampling


def _scored_rows(chunk: Chunk, query_start: int) -> NDArray[np.int32]:
    offset = query_start - chunk.sequence.num_computed
    return np.arange(chunk.scored.start + offset, chunk.scored.stop + offset, dtype=np.int32)


def _with_scored(sampling: SamplingBatch, chunks: list[Chunk]) -> SamplingBatch:
    targets = [chunk.sequence.tokens[chunk.scored.start + 1 : chunk.scored.stop + 1] for chunk in chunks]
    counts = np.array([chunk.sequence.num_prompt_logprobs for chunk in chunks], dtype=np.int32)
    return sampling.with_targets(np.concatenate(targets), np.repeat(counts, [chunk.num_scored for chunk in chunks]))


def _set_history(sampling: SamplingBatch, sequences: list[Sequence]) -> None:
    histories = [s.tokens[: s.num_tokens if s.uses_history else 0] for s in sequences]
    np.cumsum([len(history) for history in histories], out=sampling.history_start[1:])
    sampling.history_ids = np.concatenate(histories)


def _joined(parts: list[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
