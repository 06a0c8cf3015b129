"""PromptMedia: the media of one prompt, while the engine computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..devices.tower import Rows
from .media import Media, MediaSpan
from .vision import Vision


class PromptMedia:
    """Where a prompt's media stand, what positions their tokens have, and their embeddings once these are there.

    All choices of a request share it. `rope [3, prompt_len]` are the positions of the prompt's tokens by time, height
    and width, None if they are counted as text is; behind the prompt, a token's are its own position plus `delta`.
    `embeddings` are by digest. `two_way`: tokens of a span see all of it, so a step runs it as a whole. `added_after`
    is as in Vision.
    """

    def __init__(self, spans: Sequence[MediaSpan], token_ids: NDArray[np.int32], vision: Vision) -> None:
        self.spans = tuple(spans)
        self.two_way = vision.two_way
        self.added_after = vision.added_after
        self.embeddings: dict[bytes, Rows] = {}
        self.rope = vision.prompt_positions(self.spans, token_ids)
        self.delta = 0 if self.rope is None else int(self.rope.max()) + 1 - len(token_ids)
        self._around = vision.places_tokens_around

    @property
    def media(self) -> Iterator[Media]:
        """The media in order, each once."""
        return iter({span.media.digest: span.media for span in self.spans}.values())

    @property
    def identity(self) -> tuple[tuple[int, bytes], ...]:
        """What they add to the identity of the prompt's KV blocks."""
        named = [
            (span.start, span.media.digest + span.first_row.to_bytes(4, "little") + span.length.to_bytes(4, "little"))
            for span in self.spans
        ]
        if not self._around or self.rope is None:
            return tuple(named)
        # A prompt that goes on could give the tokens after its end other places than an answer's have.
        ends = [(self.rope.shape[1], b"end")] if self.rope[:, -1].min() < self.rope.max() else []
        return (*((start - 1, digest) for start, digest in named), *ends)

    def uncut(self, start: int, num_tokens: int, room: int) -> int:
        """How many of the next `num_tokens` tokens from position `start` on a step may have, without a cut in a span.

        It may be more, up to `room`, where a span begins; 0 if it has no room.
        """
        end = start + num_tokens
        cut = next((span for span in self.spans if self.two_way and span.start < end < span.end), None)
        if cut is None:
            return num_tokens
        if cut.start > start:
            return cut.start - start
        return cut.end - start if cut.end - start <= room else 0

    def within(self, start: int, end: int) -> Iterator[tuple[slice, Rows]]:
        """Rows for the tokens from position `start` to `end`, and the places of these tokens counted from `start`."""
        for span in self.spans:
            first, last = max(span.start, start), min(span.end, end)
            if first < last:
                row = span.first_row + first - span.start
                yield slice(first - start, last - start), self.embeddings[span.media.digest][row : row + last - first]

    def visible_until(self, start: int, end: int) -> NDArray[np.int32]:
        """The position before which the tokens from position `start` to `end` see all: see StepBatch."""
        visible = np.arange(start + 1, end + 1, dtype=np.int32)
        for span in self.spans:
            visible[max(span.start - start, 0) : max(span.end - start, 0)] = span.end
        return visible

    def rope_positions(self, start: int, end: int) -> NDArray[np.int32]:
        """The positions `[3, end - start]` of the tokens from position `start` to `end`. The prompt has `rope`."""
        assert self.rope is not None
        known = self.rope[:, start:end]
        behind = np.arange(max(start, self.rope.shape[1]), end, dtype=np.int32) + self.delta
        return np.concatenate((known, np.tile(behind, (3, 1))), axis=1)


def positions_behind(prompts: Sequence[PromptMedia | None], positions: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """The positions `[3, S]` of a token behind each prompt at `positions [S]`; None if they are counted as text is."""
    deltas = [0 if media is None else media.delta for media in prompts]
    if not any(deltas):
        return None
    return np.tile(positions + np.array(deltas, np.int32), (3, 1))
