"""What processors of images have in common: resizing as Pillow does, patches, and pixels as the tower takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..declaring.record import record
from ..weights.dtypes import bfloat16_bits
from .picture import Picture

Image = NDArray[np.uint8]  # [height, width, 3]
Floats = NDArray[np.float32]

MAX_PATCHES = 2**16  # of an image
MAX_RATIO = 200  # of the sides, where one side decides the size of the other
_MAX_PIXELS = 2**27  # of an image on its way
_PIECE = 512  # rows at a time
_PIXELS = 2**14  # at a time


def resize(picture: Picture, height: int, width: int, resample: int) -> Picture:
    """The picture in another size. `resample` is one of Pillow's filters, by its number.

    Raises ValueError for a size that no settings should lead to.
    """
    from PIL import Image as Pillow

    _require_pixels(picture, height, width)
    return Picture(picture.image.resize((width, height), Pillow.Resampling(resample)))


def _require_pixels(picture: Picture, height: int, width: int) -> None:
    if height * width > _MAX_PIXELS:
        raise ValueError(
            f"an image of {picture.shape[1]} x {picture.shape[0]} pixels becomes one of {width} x {height} for this "
            "model, which is too large: send one whose sides are more alike"
        )


def require_ratio(picture: Picture, most: float = MAX_RATIO) -> None:
    """Raise ValueError for an image that is much longer than wide, or much wider than long."""
    height, width = picture.shape[:2]
    require_sides(height, width, most)


def require_sides(height: int, width: int, most: float = MAX_RATIO) -> None:
    """The same for an image of that height and width."""
    if max(height, width) > most * min(height, width):
        raise ValueError(
            f"an image of {width} x {height} pixels is too narrow: this model takes images whose longer side is at "
            f"most {most} times the shorter one"
        )


def centre_crop(picture: Picture, height: int, width: int) -> Picture:
    """The middle of an image; what it lacks is black."""
    image = picture.pixels
    rows, columns = image.shape[:2]
    if rows >= height and columns >= width:
        top, left = (rows - height) // 2, (columns - width) // 2
        return Picture(image[top : top + height, left : left + width])
    padded = np.zeros((max(height, rows), max(width, columns), 3), np.uint8)
    above, before = -(-(len(padded) - rows) // 2), -(-(padded.shape[1] - columns) // 2)
    padded[above : above + rows, before : before + columns] = image
    top, left = (rows - height) // 2 + above, (columns - width) // 2 + before
    return Picture(padded[top : top + height, left : left + width])


def padded_to_square(picture: Picture, colour: Sequence[int]) -> Picture:
    """The image in the middle of a square of `colour`. Raises ValueError for one of too many pixels."""
    height, width = picture.shape[:2]
    side = max(height, width)
    _require_pixels(picture, side, side)
    square = np.empty((side, side, 3), np.uint8)
    square[:] = np.array(colour, np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = picture.pixels
    return Picture(square)


def padded_behind(picture: Picture, height: int, width: int) -> Picture:
    """The image with black at the right and below. Raises ValueError for one of too many pixels."""
    _require_pixels(picture, height, width)
    padded = np.zeros((height, width, 3), np.uint8)
    padded[: picture.shape[0], : picture.shape[1]] = picture.pixels
    return Picture(padded)


def cut(picture: Picture, rows: int, columns: int) -> tuple[Picture, ...]:
    """The image in `rows` x `columns` equal parts, row by row."""
    image = picture.pixels
    height, width = image.shape[0] // rows, image.shape[1] // columns
    return tuple(
        Picture(image[row * height : (row + 1) * height, column * width : (column + 1) * width])
        for row in range(rows)
        for column in range(columns)
    )


def arrangements(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """All columns and rows of as many tiles, those of few tiles first."""
    found = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if columns * rows >= least
    ]
    return tuple(sorted(found, key=lambda one: one[0] * one[1]))


def nearest_arrangement(among: Sequence[tuple[int, int]], height: int, width: int, side: int) -> tuple[int, int]:
    """Columns and rows of tiles whose aspect ratio is nearest to an image's.

    Of equally near ones, the last of which the image fills more than a half.
    """
    best, least = (1, 1), float("inf")
    for columns, rows in among:
        difference = abs(width / height - columns / rows)
        if difference < least:
            best, least = (columns, rows), difference
        elif difference == least and width * height > 0.5 * side**2 * columns * rows:
            best = columns, rows
    return best


@record(frozen=True)
class Pixels:
    """How a level of a colour becomes a number: `(level * factor - mean) / std`, colour by colour.

    With `bfloat16` each of the three steps is rounded to it.
    """

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    bfloat16: bool = False

    @cached_property
    def table(self) -> Floats:
        """The number of each level `[256, 3]`, rounded where transformers rounds it."""
        mean, std = (np.array(values, np.float32) for values in (self.mean, self.std))
        table: Floats
        if self.bfloat16:
            levels = _to_bfloat16(np.arange(256, dtype=np.float32) * np.float32(self.factor))
            table = _to_bfloat16(_to_bfloat16(levels[:, None] - _to_bfloat16(mean)) / _to_bfloat16(std))
            return table
        levels = (np.arange(256, dtype=np.float64) * self.factor).astype(np.float32)
        table = (levels[:, None] - mean) / std
        return table

    def of(self, image: Image) -> Floats:
        """The numbers of an image or of several, `[..., height, width, 3]`."""
        return self.table[image, np.arange(3)]


def _to_bfloat16(values: Floats) -> Floats:
    return (bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)


@record(frozen=True)
class Patches:
    """How an image is cut: squares of `size` pixels, as a convolution over them takes their numbers.

    They come row by row, or in blocks of `merge` x `merge` that become one embedding. A patch is `frames` equal images
    one after the other, colour by colour, or with `colours_last` one image pixel by pixel. What is left at the right
    and at the bottom belongs to no patch.
    """

    pixels: Pixels
    size: int
    merge: int = 1
    frames: int = 1
    colours_last: bool = False

    @property
    def inputs(self) -> int:
        """How many numbers a patch has."""
        return 3 * self.frames * self.size**2

    def grid(self, image: Image | Picture) -> tuple[int, int]:
        """Rows and columns of patches."""
        return image.shape[0] // self.size, image.shape[1] // self.size

    def pieces(self, images: Sequence[Image], together: int = 1) -> Iterator[Floats]:
        """The patches of images `[N, inputs]`, some whole rows of blocks at a time.

        With `together`, which then is `frames`, as many images one after the other have their patches in common.
        """
        for first in range(0, len(images), together):
            frames = images[first : first + together]
            rows, columns = self.grid(frames[0])
            step = max(_PIECE // (columns * self.merge), 1) * self.merge
            for start in range(0, rows, step):
                yield self._of_rows(frames, start, min(start + step, rows), columns)

    def _of_rows(self, frames: Sequence[Image], start: int, stop: int, columns: int) -> Floats:
        size, merge = self.size, self.merge
        shape = ((stop - start) // merge, merge, size, columns // merge, merge, size, 3)
        blocks = [frame[start * size : stop * size, : columns * size].reshape(shape) for frame in frames]
        if self.colours_last:
            levels = np.ascontiguousarray(blocks[0].transpose(0, 3, 1, 4, 2, 5, 6)).reshape(-1, size, size, 3)
            return self.pixels.of(levels).reshape(-1, self.inputs)
        planes = [block.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, size**2) for block in blocks]
        levels = np.stack(planes, axis=2)
        values = np.empty((len(levels), 3, self.frames, size**2), np.float32)
        for colour in range(3):  # three times as fast as all at once
            values[:, colour] = self.pixels.table[:, colour].take(levels[:, colour])
        return values.reshape(-1, self.inputs)


def block_places(rows: int, columns: int, merge: int = 1) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Row and column of each patch, `[rows * columns]` each, in the order of `Patches`."""
    blocks = (rows // merge, columns // merge, merge, merge)
    row, column, inner_row, inner_column = np.indices(blocks, np.int32).reshape(4, -1)
    return row * merge + inner_row, column * merge + inner_column


Indices = NDArray[np.int32]


def bilinear(
    table: Floats, side: int, rows: Indices, columns: Indices, grid: tuple[int, int], *, corners: bool = True
) -> Floats:
    """A square table of positions `[side * side, hidden]` at rows and columns of a grid whose corners lie on its own.

    Or at the middles of the grid's cells, without `corners`; the table goes on as at its border. Shape: `[N, hidden]`,
    for as many rows and columns.
    """

    def taps(index: Indices, size: int) -> list[tuple[Indices, Floats]]:
        if corners:
            place = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        else:
            place = _middles(index, side, size).clip(0, side - 1)
        first = place.astype(np.int32)
        above = place - first.astype(np.float32)
        return [(first, np.float32(1) - above), (np.minimum(first + 1, side - 1), above)]

    return _weighted(table, side, taps(rows, grid[0]), taps(columns, grid[1]))


def bicubic(table: Floats, side: int, rows: Indices, columns: Indices, grid: tuple[int, int]) -> Floats:
    """The same at the middles of a grid's cells, by Keys' kernel with a = -0.75; the table goes on as at its border."""
    return _weighted(table, side, _cubic_taps(rows, side, grid[0]), _cubic_taps(columns, side, grid[1]))


def _cubic_taps(index: Indices, side: int, size: int) -> list[tuple[Indices, Floats]]:
    """Of each cell, the four entries along a side of a table that count, and their weights."""
    place = _middles(index, side, size)
    first = np.floor(place).astype(np.int32)
    found = []
    for offset in range(-1, 3):
        far = np.abs(place - (first + offset).astype(np.float32))
        near_weight = (np.float32(1.25) * far - np.float32(2.25)) * far * far + np.float32(1)
        far_weight = np.float32(-0.75) * (((far - np.float32(5)) * far + np.float32(8)) * far - np.float32(4))
        weight = np.where(far <= 1, near_weight, far_weight)
        found.append((np.clip(first + offset, 0, side - 1), weight))
    return found


def resized_bicubic(pixels: Pixels, image: Image, height: int, width: int) -> Iterator[Floats]:
    """The numbers of an image in another size, `[height, width, 3]`, some rows at a time.

    By the same kernel, which sees four pixels along a side of an image that shrinks, too.
    """
    columns = _cubic_taps(np.arange(width, dtype=np.int32), image.shape[1], width)
    step = max(_PIXELS // max(image.shape[1], width), 1)
    for start in range(0, height, step):
        index = np.arange(start, min(start + step, height), dtype=np.int32)
        rows = np.zeros((len(index), image.shape[1], 3), np.float32)
        for row, weight in _cubic_taps(index, image.shape[0], height):
            rows += pixels.of(image[row]) * weight[:, None, None]
        result = np.zeros((len(index), width, 3), np.float32)
        for column, weight in columns:
            result += rows[:, column] * weight[:, None]
        yield result


def _middles(index: Indices, side: int, size: int) -> Floats:
    """Where the middles of cells lie along a side of a table."""
    return (index.astype(np.float32) + np.float32(0.5)) * np.float32(side) / np.float32(size) - np.float32(0.5)


def antialiased(table: Floats, side: int, grid: tuple[int, int]) -> Floats:
    """A square table of positions at the middles of a grid's cells, row by row: `[rows * columns, hidden]`.

    Each is the mean of entries near it, weighted by how near; with fewer cells than entries more of them count.
    """
    weights = []
    for size in grid:
        scale = np.float32(side / size)
        middles = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
        far = np.abs(np.arange(side, dtype=np.float32) - middles[:, None]) / max(scale, np.float32(1))
        near = np.maximum(np.float32(1) - far, 0)
        weights.append(near / near.sum(-1, keepdims=True))
    plane = table.reshape(side, side, -1)
    result = np.zeros((grid[0], grid[1], plane.shape[2]), np.float32)
    for row in range(side):
        # Summed entry by entry, so that no library chooses the order.
        across = np.zeros((grid[1], plane.shape[2]), np.float32)
        for column in range(side):
            across += weights[1][:, column, None] * plane[row, column]
        result += weights[0][:, row, None, None] * across
    return result.reshape(-1, plane.shape[2])


def _weighted(
    table: Floats, side: int, rows: list[tuple[Indices, Floats]], columns: list[tuple[Indices, Floats]]
) -> Floats:
    """The sum of entries of a square table, each by the weights of its row and its column."""
    result = np.zeros((len(rows[0][0]), table.shape[1]), np.float32)
    for row, row_weight in rows:
        for column, column_weight in columns:
            result += table[row * side + column] * (row_weight * column_weight)[:, None]
    return result


def gelu(rows: Floats) -> Floats:
    """GELU, exact to 2e-7 of a value, with the error function of Abramowitz and Stegun, 7.1.26."""
    x = rows.astype(np.float64)
    size = np.abs(x) / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * size)
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    erf = np.sign(x) * (1 - tail * np.exp(-size * size))
    result: Floats = (0.5 * x * (1 + erf)).astype(np.float32)
    return result


def resized_bilinear(plane: Floats, rows: int, columns: int) -> Floats:
    """A plane of features `[height, width, F]` with as many rows and columns: between the two nearest, cell by cell."""
    for axis, size in ((1, columns), (0, rows)):
        count = plane.shape[axis]
        place = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32(count / size) - np.float32(0.5)
        place = np.maximum(place, 0)
        first = place.astype(np.int32)
        above = (place - first.astype(np.float32)).reshape(-1, *[1] * (2 - axis))
        second = np.minimum(first + 1, count - 1)
        plane = plane.take(first, axis) * (1 - above) + plane.take(second, axis) * above
    return plane


def nearest(side: int, count: int) -> NDArray[np.int64]:
    """Of `count` patches in a line, the entries of a table with `side` of them that lie nearest below."""
    places = np.arange(count, dtype=np.float32) * (np.float32(1) / np.float32(count))
    return nearest_below(side, np.minimum(places, np.float32(1 - 1e-6)))


def nearest_below(side: int, places: Floats) -> NDArray[np.int64]:
    """The same for places from 0 to 1 along that line."""
    bounds = (np.float64(1 / side) + np.arange(max(side - 1, 0), dtype=np.float64) * (1 / side)).astype(np.float32)
    entries: NDArray[np.int64] = np.searchsorted(bounds, places, side="right")
    return entries


def joined_blocks(rows: Floats, grid: tuple[int, int], merge: int) -> Floats:
    """Patches `[rows * columns, width]`, row by row, joined in blocks of `merge` x `merge`: `[N, merge^2 * width]`."""
    height, width = grid
    blocks = rows.reshape(height // merge, merge, width // merge, merge, -1).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(blocks).reshape((height // merge) * (width // merge), -1)


def block_means(rows: Floats, grid: tuple[int, int], merge: int) -> Floats:
    """The mean of each block of `merge` x `merge` patches, summed in one order: `[blocks, width]`, row by row.

    `rows [rows * columns, width]` are row by row too. What is left at the right and at the bottom is in no block.
    """
    height, width = grid[0] // merge, grid[1] // merge
    used = rows.reshape(*grid, -1)[: height * merge, : width * merge]
    blocks = used.reshape(height, merge, width, merge, -1)
    total = np.zeros((height, width, rows.shape[1]), np.float32)
    for row in range(merge):
        for column in range(merge):
            total += blocks[:, row, :, column]
    return total.reshape(height * width, -1) / np.float32(merge**2)


def normalized(rows: Floats, eps: float, weight: Floats, bias: Floats | None = None) -> Floats:
    """LayerNorm of rows, or RMSNorm if there is no bias: each row by itself, summed in float64."""
    width = rows.shape[-1]
    if bias is not None:
        rows = rows - (np.add.reduce(rows, -1, np.float64, keepdims=True) / width).astype(np.float32)
    scales = 1 / np.sqrt(np.add.reduce(rows * rows, -1, np.float64, keepdims=True) / width + eps)
    result: Floats = rows * scales.astype(np.float32) * weight
    return result if bias is None else result + bias
