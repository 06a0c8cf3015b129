"""Products with grouped matrices on a TPU, in Pallas: tiles are dequantized in vector memory as they are multiplied.

XLA would write the dequantized matrix, and its scales for each input, to the chip's memory and read them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..grouped_weights import RUN

_HALF = RUN // 2
_MOST_ROWS = 512  # of codes in a tile
_MOST_TOGETHER = 4096  # of all rows in one, of few outputs
_LANES = 128

# Of codes `[rows, lanes] int32` of 4 bits (which half) or 8 bits (None), the numbers in float32.
Numbers = Callable[[jax.Array], jax.Array]


class Tiles(NamedTuple):
    """The sizes of a product's tiles: tokens, outputs, and rows of codes, of which `shared` have a scale in common."""

    tokens: int
    outputs: int
    rows: int
    shared: int


def tiles_of(
    num_tokens: int, code_rows: int, outputs: int, inputs: int, group_size: int, *, in_four: bool
) -> Tiles | None:
    """How a product is divided; None: the kernel has no tiles for such a matrix."""
    shared = group_size // 2 if in_four and group_size > _HALF else group_size
    unit = max(shared, _HALF)
    if inputs % group_size or inputs != (2 if in_four else 1) * code_rows or code_rows % unit or outputs % _LANES:
        return None
    # Rows of codes are lanes of tokens, in whole vectors or all together.
    step = max(unit, _LANES)
    rows = next((rows for rows in range(max(_MOST_ROWS, step), 0, -step) if code_rows % rows == 0), code_rows)
    if rows > _MOST_TOGETHER:
        return None
    tokens = next((size for size in (256, 128, 64, 32, 16) if num_tokens % size == 0), None)
    columns = next(size for size in (512, 256, 128) if outputs % size == 0 and (size == 128 or rows <= _MOST_ROWS))
    return None if tokens is None else Tiles(tokens, columns, rows, shared)


def multiply(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    minima: jax.Array | None,
    numbers: Numbers,
    group_size: int,
    tiles: Tiles,
    *,
    in_four: bool,
) -> jax.Array:
    """`x W^T` in float32 of `x [T, K]`. All else is as in Grouped; `numbers` says what codes mean."""
    T, outputs = x.shape[0], codes.shape[1]
    halves = 2 if in_four else 1
    blocks = codes.shape[0] // tiles.rows
    if in_four:  # the inputs of low halves, and those of high halves
        runs = jnp.pad(x, ((0, 0), (0, 2 * codes.shape[0] - x.shape[1]))).reshape(T, -1, 2, _HALF)
        xs = [runs[:, :, half].reshape(T, -1) for half in range(2)]
    else:
        xs = [x]

    def by_half(array: jax.Array) -> list[jax.Array]:
        """For each half, what its rows of codes share, `[blocks, rows of a tile / shared, N]`."""
        if in_four and group_size <= _HALF:
            parts = array.reshape(-1, 2, _HALF // group_size, outputs)
            return [parts[:, half].reshape(blocks, -1, outputs) for half in range(2)]
        return [array.reshape(blocks, -1, outputs)] * halves

    scale_arrays = by_half(scales)
    minimum_arrays = [] if minima is None else by_half(minima)
    of_tile = pl.BlockSpec((None, tiles.rows // tiles.shared, tiles.outputs), lambda t, n, k: (k, 0, n))
    product: jax.Array = pl.pallas_call(
        partial(_kernel, numbers, tiles.shared, halves),
        grid=(T // tiles.tokens, outputs // tiles.outputs, blocks),
        in_specs=[
            *[pl.BlockSpec((tiles.tokens, tiles.rows), lambda t, n, k: (t, k))] * halves,
            pl.BlockSpec((tiles.rows, tiles.outputs), lambda t, n, k: (k, n)),
            *[of_tile] * (len(scale_arrays) + len(minimum_arrays)),
        ],
        out_specs=pl.BlockSpec((tiles.tokens, tiles.outputs), lambda t, n, k: (t, n)),
        out_shape=jax.ShapeDtypeStruct((T, outputs), jnp.float32),
    )(*xs, codes, *scale_arrays, *minimum_arrays)
    return product


def _kernel(numbers: Numbers, shared: int, halves: int, *refs: Any) -> None:
    xs, codes, rest = refs[:halves], refs[halves][...].astype(jnp.int32), refs[halves + 1 : -1]
    out = refs[-1]

    first = pl.program_id(2) == 0
    total = jnp.where(first, 0.0, out[...])
    scales, minima = rest[:halves], rest[halves:]
    for half in range(halves):
        own = codes if halves == 1 else codes >> 4 * half & 15
        weights = numbers(own).reshape(-1, shared, own.shape[1]) * _each(scales, half)
        if minima:
            weights = weights - _each(minima, half)
        x = xs[half][...]
        total += jnp.dot(x, weights.reshape(own.shape).astype(x.dtype), preferred_element_type=jnp.float32)
    out[...] = total


def _each(arrays: Sequence[Any], half: int) -> jax.Array:
    return arrays[half][...].astype(jnp.float32)[:, None, :]
