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
from jax.experimental.pallas import tpu as pltpu

from ..grouped_weights import RUN

_HALF = RUN // 2
_MOST_ROWS = 512  # of codes in a tile
_MOST_TOGETHER = 4096  # of all rows in one, of few outputs
_LANES, _WORDS = 128, 8  # of a vector; its words are rows

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


class Blocks(NamedTuple):
    """Tiles of tokens that have matrices of their own: tile i that of `experts [tiles] int32`.

    The first `used [1] int32` of them count; the results of others may be anything. These name the last expert again,
    so that no matrix is read for them.
    """

    experts: jax.Array
    used: jax.Array


Where = Callable[[Any, Any, Any], tuple[Any, ...]]  # a block's place in an array, for the grid's tile (t, n, k)


def multiply(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    minima: jax.Array | None,
    numbers: Numbers,
    tiles: Tiles,
    *,
    in_four: bool,
    of_tokens: Blocks | None = None,
) -> jax.Array:
    """`x W^T` in float32 of `x [T, K]`. All else is as in Grouped; `numbers` says what codes mean.

    With `of_tokens` there is a stack of matrices: codes, scales and minima have one more dimension, the first.
    """
    T, (rows, outputs) = x.shape[0], codes.shape[-2:]
    halves = 2 if in_four else 1
    grid = (T // tiles.tokens, outputs // tiles.outputs, rows // tiles.rows)
    if in_four:  # the inputs of low halves, and those of high halves
        runs = jnp.pad(x, ((0, 0), (0, 2 * rows - x.shape[1]))).reshape(T, -1, 2, _HALF)
        xs = [runs[:, :, half].reshape(T, -1) for half in range(2)]
    else:
        xs = [x]

    def spec(shape: tuple[int | None, ...], where: Where, *, in_stack: bool = True) -> pl.BlockSpec:
        """Blocks of that shape, of a tile's own matrix if they are `in_stack`."""
        if of_tokens is None:
            return pl.BlockSpec(shape, where)

        def of_block(t: Any, n: Any, k: Any, experts: Any, used: Any) -> tuple[Any, ...]:
            # What is left out stays at the last place, so that nothing is copied for it.
            is_used, last = t < used[0], jnp.maximum(used[0] - 1, 0)
            t, n, k = (jnp.where(is_used, *pair) for pair in ((t, last), (n, grid[1] - 1), (k, grid[2] - 1)))
            return (experts[t], *where(t, n, k)) if in_stack else where(t, n, k)

        return pl.BlockSpec((None, *shape) if in_stack else shape, of_block)

    def of_groups(array: jax.Array) -> list[tuple[jax.Array, pl.BlockSpec]]:
        """For each half, what its rows of codes share: `[rows of a tile / shared, outputs of a tile]` at a time."""
        groups, where = tiles.rows // tiles.shared, _at_rows
        shape: tuple[int | None, ...] = groups, tiles.outputs
        if groups % (_WORDS * 4 // array.dtype.itemsize) and groups != array.shape[-2]:
            # Parts of vectors: XLA has to copy them.
            array = array.reshape(*array.shape[:-2], -1, groups, outputs)
            shape, where = (None, *shape), lambda t, n, k: (k, 0, n)
        if scales.ndim == codes.ndim:
            return [(array, spec(shape, where))] * halves
        return [(array, spec((None, *shape), partial(_of_half, half, where))) for half in range(2)]

    shared = of_groups(scales) + ([] if minima is None else of_groups(minima))
    in_specs = [
        *[spec((tiles.tokens, tiles.rows), lambda t, n, k: (t, k), in_stack=False)] * halves,
        spec((tiles.rows, tiles.outputs), _at_rows),
        *[block for _, block in shared],
    ]
    out_specs = spec((tiles.tokens, tiles.outputs), lambda t, n, k: (t, n), in_stack=False)
    add_tile = partial(_add_tile, numbers, tiles.shared, halves)
    arrays = (*xs, codes, *[array for array, _ in shared])
    call = partial(pl.pallas_call, out_shape=jax.ShapeDtypeStruct((T, outputs), jnp.float32))
    product: jax.Array
    if of_tokens is None:
        product = call(partial(_always, add_tile), grid=grid, in_specs=in_specs, out_specs=out_specs)(*arrays)
    else:
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(of_tokens), grid=grid, in_specs=in_specs, out_specs=out_specs
        )
        product = call(partial(_if_used, add_tile), grid_spec=grid_spec)(*of_tokens, *arrays)
    return product


def _at_rows(t: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return (k, n)


def _of_half(half: int, where: Where, t: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return (half, *where(t, n, k))


def _always(add_tile: Callable[..., None], *refs: Any) -> None:
    add_tile(pl.program_id(2) == 0, *refs)


def _if_used(add_tile: Callable[..., None], experts: Any, used: Any, *refs: Any) -> None:
    is_first = pl.program_id(2) == 0  # the interpreter does not know it inside of a condition
    pl.when(pl.program_id(0) < used[0])(lambda: add_tile(is_first, *refs))


def _add_tile(numbers: Numbers, shared: int, halves: int, is_first: Any, *refs: Any) -> None:
    xs, codes, rest = refs[:halves], refs[halves][...].astype(jnp.int32), refs[halves + 1 : -1]
    out = refs[-1]

    total = jnp.where(is_first, 0.0, out[...])
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
