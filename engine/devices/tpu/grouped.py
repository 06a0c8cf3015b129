"""Matrices of small numbers with scales for groups of inputs, on the chips: see `grouped_weights.GroupedMatrix`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from ..grouped_weights import IN_FOUR_BITS, RUN, GroupedMatrix, Values
from .grouped_kernel import Blocks, Tiles, multiply, tiles_of
from .mesh import AXIS
from .products import dot, ragged

_FEWEST_ROWS, _MOST_ROWS = 16, 256  # of one expert that the kernel computes together


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "minima", "order"],
    meta_fields=["values", "inputs", "group_size", "middle", "table", "is_table", "halved", "dtype", "divided", "mesh"],
)
@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix `[N, K]`. A weight is `value * scale - minimum` in float32, rounded to `dtype`.

    `codes` are `[K, N]`, or `[ceil(K / RUN) * RUN / 2, N]` if they have 4 bits, `scales` and `minima`
    `[ceil(K / group_size), N]`, or if `halved` `[2, K / group_size / 2, N]`: those of the codes' low halves, then those
    of their high halves, as the kernel reads them. Of what `is_table`, which is looked up by rows, all are transposed.
    Stacks have one dimension more, the first. Codes are int8, even if their bits have no sign. `divided` says what
    several chips have a part of.
    """

    codes: jax.Array
    scales: jax.Array
    minima: jax.Array | None
    order: jax.Array | None
    values: Values
    inputs: int
    group_size: int
    middle: int
    table: tuple[float, ...] | None
    is_table: bool
    halved: bool
    dtype: str
    divided: Literal["outputs", "inputs"] | None
    mesh: Mesh

    def multiply(self, x: jax.Array) -> jax.Array:
        """`x W^T` in float32 of `x [T, K]`, which is rounded to `dtype`."""
        x = self.ordered(x.astype(self.dtype))
        if self.group_size < self.inputs:
            return dot(x, self.weights(), 0) if self._tiles(len(x)) is None else self._by_kernel(x)
        # Numbers of 8 bits and less are exact in any type, and XLA reads them as they are.
        scales, minima = (None if array is None else array.reshape(-1) for array in (self.scales, self.minima))
        y = dot(x, self._numbers().astype(self.dtype), 0) * scales
        return y if minima is None else y - x.astype(jnp.float32).sum(-1, keepdims=True) * minima

    def multiply_stack(self, x: jax.Array, expert: jax.Array, sizes: jax.Array) -> jax.Array:
        """Each row of `x [N, K]` with the matrix of its expert in the stack, in float32, `[N, outputs]`.

        `expert [N]` is ascending, and `sizes [count]` says how many rows each has. Rows of no expert, the last, get
        anything. Codes are a chip's own part.
        """
        x = self.ordered(x.astype(self.dtype))
        count, rows, outputs = self.codes.shape
        size = min(max(1 << (-(-len(x) // count) - 1).bit_length(), _FEWEST_ROWS), _MOST_ROWS)
        tiles = None
        if self._has_kernel:
            in_four = self.values in IN_FOUR_BITS
            inputs = self._inputs_of(rows)
            tiles = tiles_of(size, rows, outputs, inputs, self.group_size, in_four=in_four)
        if tiles is None:
            return ragged(x, self.stack(), sizes)
        return self._stack_by_kernel(x, expert, sizes, tiles)

    def ordered(self, x: jax.Array) -> jax.Array:
        """`x [T, K]` with its inputs in the stored order."""
        return x if self.order is None else x[:, self.order]

    def rows(self, index: jax.Array) -> jax.Array:
        """Rows `index [T]` of a table, `[T, K]`."""
        chosen: Grouped = jax.tree.map(lambda array: array[index], self)
        return chosen.weights()

    def stack(self) -> jax.Array:
        """All matrices of a stack, `[count, K, N]`, inputs in the stored order."""
        return lax.map(lambda matrix: matrix.weights(), replace(self, order=None))  # one is in float32 at a time

    def partitions(self) -> Grouped:
        """How its arrays are divided among chips: a tree of PartitionSpec for shard_map."""
        partitions: Grouped = jax.tree.map(self._partition, self)
        return partitions

    def weights(self) -> jax.Array:
        """All weights, `[K, N]`, or `[N, K]` of a table, inputs in the stored order."""
        weights = self._numbers() * self._spread(self.scales)
        if self.minima is not None:
            weights = weights - self._spread(self.minima)
        return weights.astype(self.dtype)

    def _tiles(self, num_tokens: int) -> Tiles | None:
        """How a chip's kernel divides its part of a product; None: XLA computes it."""
        if not self._has_kernel:
            return None
        (rows, outputs), inputs = self.codes.shape, self.inputs
        if self.divided == "outputs":
            outputs //= self.mesh.size
        elif self.divided == "inputs":
            rows, inputs = rows // self.mesh.size, inputs // self.mesh.size
        return tiles_of(num_tokens, rows, outputs, inputs, self.group_size, in_four=self.values in IN_FOUR_BITS)

    def _stack_by_kernel(self, x: jax.Array, expert: jax.Array, sizes: jax.Array, tiles: Tiles) -> jax.Array:
        """Rows are put into blocks of `tiles.tokens` rows of one expert, of which the last is filled partly."""
        size, count = tiles.tokens, min(len(x), len(x) // tiles.tokens + len(sizes))
        ends = jnp.cumsum(-(-sizes // size))  # of each expert's blocks
        first_rows, first_blocks = jnp.cumsum(sizes) - sizes, ends - -(-sizes // size)
        block = jnp.minimum(jnp.arange(count), jnp.maximum(ends[-1] - 1, 0))
        experts = jnp.minimum(jnp.searchsorted(ends, block, side="right"), len(sizes) - 1)
        within = (block - first_blocks[experts])[:, None] * size + jnp.arange(size)
        row = jnp.where(within < sizes[experts, None], first_rows[experts, None] + within, 0)
        y = multiply(
            x[row.reshape(-1)],
            self.codes,
            self.scales,
            self.minima,
            self.meanings,
            tiles,
            in_four=self.values in IN_FOUR_BITS,
            of_tokens=Blocks(experts.astype(jnp.int32), ends[-1:].astype(jnp.int32)),
        )
        own = jnp.minimum(expert, len(sizes) - 1)
        return y[first_blocks[own] * size + jnp.arange(len(x)) - first_rows[own]]

    @property
    def _has_kernel(self) -> bool:
        return self.mesh.devices.flat[0].platform == "tpu" and self.dtype == "bfloat16"

    def _by_kernel(self, x: jax.Array) -> jax.Array:
        tiles = self._tiles(len(x))
        assert tiles is not None

        def on_chip(x: jax.Array, own: Grouped) -> jax.Array:
            in_four = own.values in IN_FOUR_BITS
            y = multiply(x, own.codes, own.scales, own.minima, own.meanings, tiles, in_four=in_four)
            return lax.psum(y, AXIS) if own.divided == "inputs" else y

        if self.mesh.size == 1:
            return on_chip(x, self)
        by_input, by_output = (
            PartitionSpec(None, AXIS if self.divided == way else None) for way in ("inputs", "outputs")
        )
        matrix = replace(self, order=None)
        product: jax.Array = jax.shard_map(
            on_chip,
            mesh=self.mesh,
            in_specs=(by_input, matrix.partitions()),
            out_specs=by_output,
            check_vma=False,
        )(x, matrix)
        return product

    def meanings(self, codes: jax.Array) -> jax.Array:
        """What codes of 4 or 8 bits mean, `int32`, in float32."""
        if self.values == "int8":
            return codes.astype(jnp.float32)
        if self.values == "e4m3":
            return e4m3(codes & 255)
        if self.values == "e2m1":
            return e2m1(codes)
        return (codes - self.middle).astype(jnp.float32) if self.table is None else looked_up(codes, self.table)

    def _partition(self, array: Any) -> PartitionSpec:
        if self.divided is None or array.ndim == 1:
            return PartitionSpec()
        of_inputs = -1 if self.is_table else -2
        axis = of_inputs if self.divided == "inputs" else -3 - of_inputs
        if self.divided == "inputs" and array.shape[axis] == 1:
            return PartitionSpec()
        return PartitionSpec(*(AXIS if index == array.ndim + axis else None for index in range(array.ndim)))

    @property
    def _axis(self) -> int:
        return 1 if self.is_table else 0

    @property
    def _count(self) -> int:
        """The inputs that there are here: a chip may have a part."""
        return self._inputs_of(self.codes.shape[self._axis])

    def _inputs_of(self, rows: int) -> int:
        """The inputs of a matrix, or a chip's part of one, with that many rows of codes."""
        return min(self.inputs, 2 * rows if self.values in IN_FOUR_BITS else rows)

    def _numbers(self) -> jax.Array:
        codes = self.codes.astype(jnp.int32)
        if self.values not in IN_FOUR_BITS:
            return self.meanings(codes)
        before, after = codes.shape[: self._axis], codes.shape[self._axis + 1 :]
        runs = codes.reshape(*before, -1, 1, RUN // 2, *after)
        nibbles = jnp.concatenate((runs & 15, runs >> 4 & 15), self._axis + 1).reshape(*before, -1, *after)
        nibbles = lax.slice_in_dim(nibbles, 0, self._count, axis=self._axis)
        return self.meanings(nibbles)

    def _spread(self, array: jax.Array) -> jax.Array:
        """A group's number for each of its inputs."""
        if self.halved:
            *stack, _, _, outputs = array.shape
            halves = array.reshape(*stack, 2, -1, RUN // 2 // self.group_size, outputs)
            array = jnp.swapaxes(halves, -4, -3).reshape(*stack, -1, outputs)
        spread = jnp.repeat(array.astype(jnp.float32), min(self.group_size, self._count), axis=self._axis)
        return lax.slice_in_dim(spread, 0, self._count, axis=self._axis)


def e4m3(codes: jax.Array) -> jax.Array:
    """The floats that bytes are, `codes int32`. Their exponents are moved to where those of float32 are."""
    magnitudes = codes & 127
    normal = lax.bitcast_convert_type((magnitudes << 20) + (120 << 23), jnp.float32)
    floats = jnp.where(magnitudes < 8, magnitudes.astype(jnp.float32) * 2.0**-9, normal)
    return jnp.where(codes > 127, -floats, floats)


def e2m1(codes: jax.Array) -> jax.Array:
    """The floats that four bits are, `codes int32`: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below 0."""
    low = codes & 7
    doubled = jnp.where(low < 4, low, jnp.where(low < 7, 2 * low - 4, 12)).astype(jnp.float32)
    return jnp.where(codes > 7, -0.5, 0.5) * doubled


def looked_up(codes: jax.Array, table: tuple[float, ...]) -> jax.Array:
    """The numbers of a table, chosen bit by bit: a TPU looks up slowly."""
    numbers: list[Any] = list(table)
    for bit in range(4):
        is_set = (codes >> bit & 1) == 1
        numbers = [jnp.where(is_set, odd, even) for even, odd in zip(numbers[::2], numbers[1::2], strict=True)]
    chosen: jax.Array = numbers[0].astype(jnp.float32)
    return chosen


def place(
    matrices: Sequence[GroupedMatrix], dtype: str, sharding: NamedSharding, *, is_stack: bool, is_table: bool
) -> Grouped:
    """A matrix, or a stack of some, on the chips of a sharding of `[N, K]`, or of the stack's `[count, K, N]`.

    All chips have all of it where a group or run would be divided.
    """
    first, mesh = matrices[0], sharding.mesh
    inputs, group = first.shape[1], first.group_size
    by_input, by_output = (*(sharding.spec if is_stack else (None, *sharding.spec[::-1])), None, None)[1:3]
    if not is_stack and len(sharding.spec) == 1:
        by_input, by_output = None, sharding.spec[0]
    together = max(RUN, group if group < inputs else 1)
    divided: Literal["outputs", "inputs"] | None = None
    if by_output == AXIS:
        divided = "outputs"
    elif by_input == AXIS and inputs // mesh.size % together == 0:
        divided = "inputs"

    def joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        if is_table:
            return arrays[0]
        return np.stack([array.T for array in arrays]) if is_stack else np.ascontiguousarray(arrays[0].T)

    halved = first.values in IN_FOUR_BITS and group <= RUN // 2 and inputs % RUN == 0 and not is_table

    def of_groups(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        array = joined(arrays)
        if not halved:
            return array
        *stack, _, outputs = array.shape
        halves = array.reshape(*stack, -1, 2, RUN // 2 // group, outputs).swapaxes(-4, -3)
        return np.ascontiguousarray(halves).reshape(*stack, 2, -1, outputs)

    floats = [matrix.floats() for matrix in matrices]
    scales = of_groups([scales for scales, _ in floats])
    codes = joined([matrix.codes.view(np.int8) for matrix in matrices])
    on_host = Grouped(
        codes,
        scales.view(ml_dtypes.bfloat16) if scales.dtype == np.uint16 else scales,
        None if floats[0][1] is None else of_groups([minima for _, minima in floats if minima is not None]),
        first.input_order,
        first.values,
        inputs,
        group,
        first.middle,
        None if first.table is None else tuple(first.table.tolist()),
        is_table,
        halved,
        dtype,
        divided,
        mesh,
    )
    placed: Grouped = jax.tree.map(
        lambda array, partition: jax.device_put(array, NamedSharding(mesh, partition)), on_host, on_host.partitions()
    )
    return placed
