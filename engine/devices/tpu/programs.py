"""The programs of a model: compiled ahead of time for fixed sizes, and called with arrays of these sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct, lax
from jax.sharding import Mesh

from .decoder import TpuDecoder
from .inputs import RowInputs, StepInputs
from .loras import Adapters, Loras
from .mesh import replicated
from .mixers import Params
from .sampler import sample

COPIED_PAIRS = 32  # KV pages or states that are copied in one call

Cache = list[jax.Array]


class Program(NamedTuple):
    """A function and the sizes and types of its arguments."""

    function: Any
    arguments: tuple[Any, ...]

    def compile(self) -> Any:
        """A function that runs it and never compiles. It takes numpy arrays in place of arrays on the device."""
        return self.function.lower(*self.arguments).compile()


@dataclass(frozen=True, slots=True)
class Programs:
    """Makes programs for a model on a mesh: `num_groups` cache groups, block tables of `width` pages.

    `params`, `cache` and `loras` have only to say their sizes, types and shardings. `hidden`, `[most tokens, hidden]
    float32`, is where a step leaves the hidden states of its tokens. `max_rows` are the largest head's. Programs with a
    `rank` compute with adapters of up to that rank.
    """

    decoder: TpuDecoder
    mesh: Mesh
    num_groups: int
    width: int
    max_rows: int
    params: Params
    cache: Sequence[Any]
    hidden: Any
    loras: Loras | None = None

    def step(self, num_tokens: int, num_seqs: int, rank: int = 0) -> Program:
        """`(params, loras, cache, hidden, sampled, StepInputs) -> (cache, hidden)`, which replace those passed.

        `sampled [most rows] int32` are the tokens of the last head.
        """

        def step(
            params: Params,
            loras: Loras | None,
            cache: Cache,
            hidden: jax.Array,
            sampled: jax.Array,
            inputs: StepInputs,
        ) -> tuple[Cache, jax.Array]:
            # A row without a token has ended its sequence, so its next token is not used.
            last = jnp.maximum(sampled[jnp.maximum(inputs.last_row, 0)], 0)
            inputs = inputs._replace(token_ids=jnp.where(inputs.last_row >= 0, last, inputs.token_ids))
            x, after = self.decoder.hidden(params, cache, inputs, _adapters(loras, inputs.adapter, rank))
            return after, lax.dynamic_update_slice(hidden, x, (0, 0))

        T, S = num_tokens, num_seqs
        inputs = StepInputs(
            self._ints(T),
            self._ints(T),
            self._ints(T),
            self._ints(T),
            (self._ints(T),) * self.num_groups,
            (self._ints(S, self.width),) * self.num_groups,
            self._ints(S + 1),
            self._ints(S),
            self._ints(1),
            self._ints(S),
            self._ints(T),
        )
        cache = _described(list(self.cache))
        function = jax.jit(
            step,
            donate_argnums=(2, 3),
            out_shardings=([array.sharding for array in cache], replicated(self.mesh)),
        )
        sampled = self._ints(self.max_rows)
        return Program(
            function, (_described(self.params), _described(self.loras), cache, _described(self.hidden), sampled, inputs)
        )

    def head(self, num_rows: int, rank: int = 0) -> Program:
        """`(params, loras, hidden, RowInputs) -> (token ids [most rows] int32, logits [R, vocab] float32)`."""

        def head(
            params: Params, loras: Loras | None, hidden: jax.Array, rows: RowInputs
        ) -> tuple[jax.Array, jax.Array]:
            logits = self.decoder.logits(params, hidden[rows.tokens], _adapters(loras, rows.adapter, rank))
            logits = lax.with_sharding_constraint(logits, everywhere)
            return jnp.pad(sample(logits, rows), (0, self.max_rows - num_rows)), logits

        R, everywhere = num_rows, replicated(self.mesh)
        floats = self._array((R,), jnp.float32)
        rows = RowInputs(self._ints(R), floats, self._ints(R), floats, floats, floats, self._ints(R))
        function = jax.jit(head, out_shardings=(everywhere, everywhere))
        return Program(function, (_described(self.params), _described(self.loras), _described(self.hidden), rows))

    def copy(self, indices: Sequence[int]) -> Program:
        """`(arrays, pairs [COPIED_PAIRS, 2]) -> arrays`, of the arrays `indices`: copies page `from` to page `to`.

        One after the other: for all at once, XLA copies whole caches to another layout and back.
        """

        def copy(arrays: Cache, pairs: jax.Array) -> Cache:
            def copy_pair(index: jax.Array, arrays: Cache) -> Cache:
                source, target = pairs[index]
                return [array.at[target].set(array[source]) for array in arrays]

            copied: Cache = lax.fori_loop(0, len(pairs), copy_pair, arrays)
            return copied

        arrays = _described([self.cache[index] for index in indices])
        function = jax.jit(copy, donate_argnums=0, out_shardings=[array.sharding for array in arrays])
        return Program(function, (arrays, self._ints(COPIED_PAIRS, 2)))

    def adapter(self) -> Program:
        """`(loras, slot, loras of one adapter) -> loras` with that adapter in the slot."""

        def write(loras: Loras, slot: jax.Array, adapter: Loras) -> Any:
            return jax.tree.map(
                lambda all, own, axis: lax.dynamic_update_index_in_dim(all, own, slot, axis),
                loras,
                adapter,
                loras.slot_axes,
            )

        loras = _described(self.loras)
        shardings = jax.tree.map(lambda array: array.sharding, loras)
        arguments = loras, self._ints(), loras.one_slot
        return Program(jax.jit(write, donate_argnums=0, out_shardings=shardings), arguments)

    def _ints(self, *shape: int) -> ShapeDtypeStruct:
        return self._array(shape, jnp.int32)

    def _array(self, shape: tuple[int, ...], dtype: Any) -> ShapeDtypeStruct:
        return ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh))


def _adapters(loras: Loras | None, slots: jax.Array, rank: int) -> Adapters | None:
    return None if loras is None or not rank else Adapters(loras, slots, rank)


def _described(arrays: Any) -> Any:
    """The same tree with sizes, types and shardings alone."""
    return jax.tree.map(lambda array: ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), arrays)
