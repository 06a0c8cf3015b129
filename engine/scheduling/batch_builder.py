"""BatchBuilder: the scheduler's step as the flat arrays a device gets.

Decoding one token each for a few dozen sequences is what the engine does most of the time, thousands of times a
second. So the arrays of an unchanged set of decoding sequences are kept, and a step only refreshes what moves.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..devices.batch import SamplingBatch, StepBatch, TokenMasks
from ..devices.limits import ExecutorLimits
from ..sequences.sampling_rows import sampling_batch, set_history
from ..sequences.sequence import Sequence
from .media_rows import media_of, rope_positions, visible_until
from .rows import StepRows
from .step import Step

_MAX_SHAPES = 64  # that are kept
_TABLE_ROOM = 8  # block table columns kept free, so that growing sequences rarely make a new table


class _Shape(Struct):
    """The arrays of decodes and drafts that stay the same as long as each sequence keeps its number of rows."""

    query_start: NDArray[np.int32]
    logits_rows: NDArray[np.int32]
    sampling: SamplingBatch | None = None  # without its positions and masks


class BatchBuilders:
    """Builds the batches of `count` sets of decoding sequences that take turns, and keeps the arrays of each.

    A batch is valid until the next one is built.
    """

    def __init__(self, limits: ExecutorLimits, count: int) -> None:
        # One more where there are several: for steps without decodes.
        self._builders = [BatchBuilder(limits) for _ in range(count if count == 1 else count + 1)]

    def build(self, step: Step, masks: TokenMasks | None = None) -> StepBatch:
        """The arrays of a step: see BatchBuilder."""
        builders = self._builders
        known = next((i for i, builder in enumerate(builders) if builder.version == step.decode_version), 0)
        builders.append(builders.pop(known))  # the first is the one that was not used for longest
        return builders[-1].build(step, masks)


class BatchBuilder:
    """Builds one StepBatch at a time. A batch is valid until the next one is built."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self._padding = np.array([[[group.padding_block]] for group in limits.groups], np.int32)
        self._tables = np.repeat(self._padding, 0, axis=1)  # [groups, S, max_blocks], of the decodes
        self._is_recurrent = limits.num_states > 0
        self._has_adapters = limits.max_loras > 0
        self._version: int | None = None
        self._decodes = _empty_batch()
        self._uses_history = False
        self._owners: list[Sequence] = []  # of the rows of the last step with drafts
        self._shapes: dict[tuple[int, ...], _Shape] = {}  # of those owners, by the rows of each

    @property
    def version(self) -> int | None:
        """Of the decodes whose arrays are kept."""
        return self._version

    def build(self, step: Step, masks: TokenMasks | None = None) -> StepBatch:
        """The arrays of a step: one of each decode, then drafts and chunks. `masks` are for its sampled rows."""
        rows, decodes = step.rows, self._decode_batch(step)
        if not (spans := rows.spans):
            decodes.sampling.masks = masks
            return decodes
        if not rows.chunks:
            return self._with_drafts(decodes, rows, masks)
        sequences, count = rows.sequences, len(rows.decodes)
        token_ids, positions = (
            _resized(decodes.token_ids, rows.num_tokens),
            _resized(decodes.positions, rows.num_tokens),
        )
        query_start = _resized(decodes.query_start, len(sequences) + 1)
        context_len = _resized(decodes.context_len, len(sequences))
        logits_rows = _resized(decodes.logits_rows, rows.num_rows)
        for s, span in enumerate(spans, count):
            token_ids[span.tokens] = span.token_ids
            positions[span.tokens] = np.arange(span.start, span.end)
            query_start[s + 1], context_len[s] = span.tokens.stop, span.end
            logits_rows[span.sampled] = span.sampled_after
        for chunk in rows.chunks:
            logits_rows[rows.scored(chunk)] = np.array(chunk.scored, np.int32) + (chunk.tokens.start - chunk.start)
        sampling = decodes.sampling
        if rows.num_sampled > count:
            sampling = _sampling(rows, positions[logits_rows[: rows.num_sampled]] + 1)
        sampling.masks = masks
        first_tables, *window_tables = self._block_tables(sequences)
        media = media_of(rows)
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            query_start=query_start,
            context_len=context_len,
            block_tables=first_tables,
            logits_rows=logits_rows,
            sampling=_with_scored(sampling, rows) if rows.num_scored else sampling,
            window_tables=tuple(window_tables),
            state_slots=self._state_slots(sequences),
            num_draft_tokens=self._num_draft_tokens(rows),
            adapters=self._adapters(sequences),
            **({} if media is None else media._asdict()),
            rope_positions=rope_positions(rows, positions),
            visible_until=visible_until(rows, positions),
        )

    def _with_drafts(self, decodes: StepBatch, rows: StepRows, masks: TokenMasks | None) -> StepBatch:
        """Decodes and drafts alone, where one token is sampled after each that runs."""
        token_ids: list[int] = []
        positions: list[int] = []
        context_len: list[int] = []
        if rows.decodes:
            token_ids, positions = decodes.token_ids.tolist(), decodes.positions.tolist()
            context_len = decodes.context_len.tolist()
        for draft in rows.drafts:
            token_ids += draft.token_ids
            positions += range(draft.start, draft.end)
            context_len.append(draft.end)
        sequences = rows.sequences
        first_tables, *window_tables = self._block_tables(sequences)
        position = np.array(positions, np.int32)
        shape = self._shape_of(rows)
        sampling = shape.sampling
        if sampling is None:
            sampling = _sampling(rows, position + 1)
            if not any(s.sampling.has_bias or s.sampling.uses_history for s in sequences):
                shape.sampling = sampling
        else:
            sampling.position = position + 1
        sampling.masks = masks
        return StepBatch(
            token_ids=np.array(token_ids, np.int32),
            positions=position,
            query_start=shape.query_start,
            context_len=np.array(context_len, np.int32),
            block_tables=first_tables,
            logits_rows=shape.logits_rows,
            sampling=sampling,
            window_tables=tuple(window_tables),
            state_slots=self._state_slots(sequences),
            num_draft_tokens=self._num_draft_tokens(rows),
            adapters=self._adapters(sequences),
            rope_positions=rope_positions(rows, position),
        )

    def _shape_of(self, rows: StepRows) -> _Shape:
        """What depends on nothing but who runs how many tokens."""
        owners, counts = rows.owners
        if owners != self._owners or len(self._shapes) >= _MAX_SHAPES:
            self._owners, self._shapes = owners, {}
        key = tuple(counts)
        if (shape := self._shapes.get(key)) is None:
            query_start = np.zeros(len(counts) + 1, np.int32)
            np.cumsum(counts, out=query_start[1:])
            shape = self._shapes[key] = _Shape(query_start, np.arange(query_start[-1], dtype=np.int32))
        return shape

    def _decode_batch(self, step: Step) -> StepBatch:
        batch, sequences = self._decodes, step.rows.decodes
        count = len(sequences)
        if step.decode_version != self._version:
            self._decodes = batch = _empty_batch(count)
            batch.positions[:] = [sequence.num_computed for sequence in sequences]
            np.add(batch.positions, 1, out=batch.context_len)
            self._set_tables(batch, sequences)
            batch.state_slots = self._state_slots(sequences)
            batch.adapters = self._adapters(sequences)
            # The same array for two things: a token is sampled where the context ends.
            batch.sampling = sampling_batch([s.sampling for s in sequences], batch.context_len)
            batch.rope_positions = rope_positions(step.rows, batch.positions, decodes_only=True)
            self._version = step.decode_version
            self._uses_history = any(sequence.sampling.uses_history for sequence in sequences)
        else:
            self._refresh_tables(batch, step)
            if sequences:
                batch.positions += 1
                batch.context_len += 1
                if batch.rope_positions is not None:
                    batch.rope_positions += 1
        batch.is_async = step.is_async
        if sequences and not step.is_async:
            batch.token_ids[:] = [sequence.last_token for sequence in sequences]
        if self._uses_history:
            set_history(batch.sampling, _histories(sequences))
        return batch

    def _refresh_tables(self, batch: StepBatch, step: Step) -> None:
        width = self._tables.shape[2]
        for row in step.moved:
            sequence = step.rows.decodes[row]
            blocks = sequence.num_blocks
            if blocks > width:
                self._set_tables(batch, step.rows.decodes)
                return
            self._tables[:, row, :blocks] = sequence.block_tables[:, :blocks]

    def _set_tables(self, batch: StepBatch, decodes: Seq[Sequence]) -> None:
        self._tables = self._block_tables(decodes, _TABLE_ROOM)
        batch.block_tables, *window_tables = self._tables
        batch.window_tables = tuple(window_tables)

    def _state_slots(self, sequences: Seq[Sequence]) -> NDArray[np.int32] | None:
        return np.array([s.state_slot for s in sequences], dtype=np.int32) if self._is_recurrent else None

    def _num_draft_tokens(self, rows: StepRows) -> NDArray[np.int32] | None:
        if not rows.drafts or not self._is_recurrent:
            return None
        counts = [len(draft.token_ids) - 1 for draft in rows.drafts]
        return np.array([0] * len(rows.decodes) + counts + [0] * len(rows.chunks), np.int32)

    def _adapters(self, sequences: Seq[Sequence]) -> NDArray[np.int32] | None:
        if not self._has_adapters or all(s.adapter < 0 for s in sequences):
            return None
        return np.array([s.adapter for s in sequences], dtype=np.int32)

    def _block_tables(self, sequences: Seq[Sequence], room: int = 0) -> NDArray[np.int32]:
        width = max([sequence.num_blocks for sequence in sequences], default=0) + room
        tables = np.empty((len(self._padding), len(sequences), width), dtype=np.int32)
        tables[:] = self._padding
        for row, sequence in enumerate(sequences):
            tables[:, row, : sequence.num_blocks] = sequence.block_tables[:, : sequence.num_blocks]
        return tables


def _empty_batch(count: int = 0) -> StepBatch:
    return StepBatch(
        token_ids=np.empty(count, dtype=np.int32),
        positions=np.empty(count, dtype=np.int32),
        query_start=np.arange(count + 1, dtype=np.int32),
        context_len=np.empty(count, dtype=np.int32),
        block_tables=np.zeros((count, 1), dtype=np.int32),
        logits_rows=np.arange(count, dtype=np.int32),
        sampling=sampling_batch([], np.empty(0, dtype=np.int32)),
    )


def _resized(array: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    """A copy with room for more values at the end."""
    longer = np.empty(size, dtype=np.int32)
    longer[: len(array)] = array
    return longer


def _sampling(rows: StepRows, positions: NDArray[np.int32]) -> SamplingBatch:
    """The rows of a step that sample the tokens at `positions`."""
    owners, counts = rows.owners
    sampling = sampling_batch([s.sampling for s in owners], positions, counts)
    if any(s.sampling.uses_history for s in owners):
        histories = _histories(rows.sampled)
        for draft in rows.drafts:
            if draft.sequence.sampling.uses_history:
                histories[draft.sampled] = draft.histories
        set_history(sampling, histories)
    return sampling


def _histories(sequences: Seq[Sequence]) -> list[NDArray[np.int32]]:
    return [s.tokens[: s.num_tokens if s.sampling.uses_history else 0] for s in sequences]


def _with_scored(sampling: SamplingBatch, rows: StepRows) -> SamplingBatch:
    chunks = [chunk for chunk in rows.chunks if chunk.num_scored]
    targets = [chunk.sequence.tokens[chunk.scored.start + 1 : chunk.scored.stop + 1] for chunk in chunks]
    counts = np.array([chunk.sequence.num_prompt_logprobs for chunk in chunks], dtype=np.int32)
    return sampling.with_targets(np.concatenate(targets), np.repeat(counts, [chunk.num_scored for chunk in chunks]))
