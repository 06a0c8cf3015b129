"""What media add to a step's batch: rows in place of embeddings, positions on rope's axes, how far tokens see."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..devices.tower import Rows
from .rows import StepRows


class StepMedia(NamedTuple):
    """What media put in place of a step's tokens: see StepBatch, whose fields these are."""

    media_rows: Rows
    media_index: NDArray[np.int32]
    media_layers: NDArray[np.int32] | None


def media_of(rows: StepRows) -> StepMedia | None:
    """The media in a step's chunks; None if there are none."""
    found = [
        (chunk.tokens.start + place.start, part)
        for chunk in rows.chunks
        if chunk.sequence.media is not None
        for place, part in chunk.sequence.media.within(chunk.start, chunk.end)
    ]
    if not found:
        return None
    index = np.full(rows.num_tokens, -1, np.int32)
    count = 0
    for first, part in found:
        index[first : first + len(part)] = np.arange(count, count + len(part))
        count += len(part)
    # All media are of one model, whose Vision says it.
    layers = next(chunk.sequence.media.added_after for chunk in rows.chunks if chunk.sequence.media is not None)
    return StepMedia(np.concatenate([part for _, part in found]), index, np.array(layers, np.int32) if layers else None)


def rope_positions(
    rows: StepRows, positions: NDArray[np.int32], *, decodes_only: bool = False
) -> NDArray[np.int32] | None:
    """The positions on rope's axes `[3, T]` of a step's tokens; None if they are `positions [T]`."""
    spans = [] if decodes_only else rows.spans
    sequences = [*rows.decodes, *(span.sequence for span in spans)]
    if all(sequence.media is None or sequence.media.rope is None for sequence in sequences):
        return None
    result = np.tile(positions, (3, 1))
    for row, sequence in enumerate(rows.decodes):
        if sequence.media is not None:
            result[:, row] += sequence.media.delta
    for span in spans:
        media = span.sequence.media
        if media is not None and media.rope is not None:
            result[:, span.tokens] = media.rope_positions(span.start, span.end)
    return result


def visible_until(rows: StepRows, positions: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """The position before which each token `[T]` sees all; None if that is what is up to itself."""
    chunks = [chunk for chunk in rows.chunks if chunk.sequence.media is not None and chunk.sequence.media.two_way]
    if not chunks:
        return None
    result = positions + 1
    for chunk in chunks:
        assert chunk.sequence.media is not None
        result[chunk.tokens] = chunk.sequence.media.visible_until(chunk.start, chunk.end)
    return result
