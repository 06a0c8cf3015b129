"""MiniCPM-V 4.7 (https://github.com/OpenBMB/MiniCPM-V): as 4.6, with positions on a canvas that all tiles share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.config import ConfigReader
from ..media import MediaSpan
from .minicpmv import MiniCpmVision
from .slices import Grid, Slices

_MARKERS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> CanvasVision:
    """The vision of MiniCPM-V 4.7."""
    return CanvasVision(architecture, config, processor)


class CanvasVision(MiniCpmVision):
    """The slices of an image lie beside each other on a canvas, and its overview is stretched over all of it.

    All tokens of an image have the same time, that at which text would go on. Tokens around its tiles, and line breaks
    behind it, have places on the canvas too.
    """

    places_tokens_around = True

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(architecture, config, processor)
        self._markers = [_token_id(ConfigReader(config), name) for name in _MARKERS]

    def positions(self, layouts: Sequence[Any]) -> list[NDArray[np.int32]]:
        return [np.concatenate([*self._tiles(layout)], axis=1) for layout in layouts]

    def prompt_positions(self, spans: Sequence[MediaSpan], token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        positions = np.empty((3, len(token_ids)), np.int32)
        is_marker = np.isin(token_ids, self._markers)
        origin = token = 0
        images = [index for index, span in enumerate(spans) if span.first_row == 0]
        for first, behind in zip(images, [*images[1:], len(spans)], strict=True):
            whole, *slices = spans[first:behind]
            start, end = whole.start - 1, spans[behind - 1].end
            while end < len(token_ids) and is_marker[end]:
                end += 1
            text = max(start - token, 0)
            positions[:, token:start] = np.arange(origin, origin + text)
            origin += text
            canvas = self._canvas(whole.media.layout)
            positions[:, start:end] = origin
            positions[1:, start] = max(origin - 1, 0)
            positions[1:, whole.end : whole.end + 1] = np.add(origin, canvas)[:, None]
            for span, counted in zip((whole, *slices), self._tiles(whole.media.layout), strict=True):
                positions[:, span.start : span.end] = counted + np.int32(origin)
            for index, span in enumerate(slices):
                positions[1:, span.start - 1] = positions[1:, span.start]
                positions[1:, span.end : span.end + 1] = positions[1:, span.end - 1, None]
                after = slices[index + 1].start - 1 if index + 1 < len(slices) else 0
                positions[1, span.end + 1 : after] = positions[1, span.end - 1]
                positions[2, span.end + 1 : after] = origin + canvas[1]
            origin += max(canvas) + 1
            token = end
        positions[:, token:] = np.arange(origin, origin + len(token_ids) - token)
        return positions

    def _canvas(self, layout: Slices) -> Grid:
        """Its rows and columns, in embeddings."""
        rows, columns = layout.last
        return rows // self._merge * max(layout.rows, 1), columns // self._merge * max(layout.columns, 1)

    def _tiles(self, layout: Slices) -> Iterator[NDArray[np.int32]]:
        """The positions `[3, N]` of the embeddings of each tile, from the canvas's corner."""
        overview = [size // self._merge for size in layout.overview]
        yield _grid([_spread(size, count) for size, count in zip(self._canvas(layout), overview, strict=True)])
        rows, columns = (size // self._merge for size in layout.last)
        for index in range(layout.rows * layout.columns):
            down, across = divmod(index, layout.columns)
            yield _grid([np.arange(rows) + down * rows, np.arange(columns) + across * columns])


def _grid(axes: Sequence[NDArray[Any]]) -> NDArray[np.int32]:
    rows, columns = np.meshgrid(*axes, indexing="ij")
    return np.stack([np.zeros_like(rows), rows, columns]).reshape(3, -1).astype(np.int32)


def _spread(size: int, count: int) -> NDArray[np.float32]:
    """So many places from 0 to `size - 1`, equally far from each other, then rounded, half to even."""
    step = np.float32(size - 1) / np.float32(max(count - 1, 1))
    index = np.arange(count, dtype=np.float32)
    # From both ends to the middle, as torch does it.
    places = np.where(index < count // 2, step * index, np.float32(size - 1) - step * (count - 1 - index))
    result: NDArray[np.float32] = np.round(places if count > 1 else index)
    return result


def _token_id(config: ConfigReader, name: str) -> int:
    value = config.raw(name)
    if type(value) is not int or not 0 <= value < 2**31:
        raise config.error(name, "the number of a token")
    return value
