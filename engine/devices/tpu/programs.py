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
from .mesh import replicated
from .mixers import Params
from .sampler import sample

COPIED_PAIRS = 32  # KV pages that are copied in one call

Pages = list[jax.Array]


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

    `params` and `pages` have only to say their sizes, types and shardings. `hidden`, `[most tokens, hidden] float32`,
    is where a step leaves the hidden states of its tokens. `max_rows` are the largest head's.
    """

    decoder: TpuDecoder
    mesh: Mesh
    num_groups: int
    width: int
    max_rows: int
    params: Params
    pages: Sequence[Any]
    hidden: Any

    def step(self, num_tokens: int, num_seqs: int) -> Program:
        """`(params, pages, hidden, sampled, StepInputs) -> (pages, hidden)`, which take the place of those passed.

        `sampled [most rows] int32` are the tokens of the last head.
        """

        def step(
            params: Params, pages: Pages, hidden: jax.Array, sampled: jax.Array, inputs: StepInputs
        ) -> tuple[Pages, jax.Array]:
            # A row without a token has ended its sequence, so its next token is not used.
            last = jnp.maximum(sampled[jnp.maximum(inputs.last_row, 0)], 0)
            inputs = inputs._replace(token_ids=jnp.where(inputs.last_row >= 0, last, inputs.token_ids))
            x, after = self.decoder.hidden(params, pages, inputs)
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
        )
        pages = [_described(page) for page in self.pages]
        function = jax.jit(
            step,
            donate_argnums=(1, 2),
            out_shardings=([page.sharding for page in pages], replicated(self.mesh)),
        )
        return Program(function, (self._params(), pages, _described(self.hidden), self._ints(self.max_rows), inputs))

    def head(self, num_rows: int) -> Program:
        """`(params, hidden, RowInputs) -> (token ids [most rows] int32, logits [R, vocab] float32)`."""

        def head(params: Params, hidden: jax.Array, rows: RowInputs) -> tuple[jax.Array, jax.Array]:
            logits = self.decoder.logits(params, hidden[rows.tokens])
            logits = lax.with_sharding_constraint(logits, everywhere)
            return jnp.pad(sample(logits, rows), (0, self.max_rows - num_rows)), logits

        R, everywhere = num_rows, replicated(self.mesh)
        floats = self._array((R,), jnp.float32)
        rows = RowInputs(self._ints(R), floats, self._ints(R), floats, floats, floats)
        function = jax.jit(head, out_shardings=(everywhere, everywhere))
        return Program(function, (self._params(), _described(self.hidden), rows))

    def copy(self, indices: Sequence[int]) -> Program:
        """`(pages, pairs [COPIED_PAIRS, 2]) -> pages`, of the arrays `indices`: copies page `from` to page `to`.

        One after the other: for all at once, XLA copies whole caches to another layout and back.
        """

        def copy(pages: Pages, pairs: jax.Array) -> Pages:
            def copy_pair(index: jax.Array, pages: Pages) -> Pages:
                source, target = pairs[index]
                return [page.at[target].set(page[source]) for page in pages]

            copied: Pages = lax.fori_loop(0, len(pairs), copy_pair, pages)
            return copied

        pages = [_described(self.pages[index]) for index in indices]
        function = jax.jit(copy, donate_argnums=0, out_shardings=[page.sharding for page in pages])
        return Program(function, (pages, self._ints(COPIED_PAIRS, 2)))

    def _params(self) -> Params:
        return {name: _described(array) for name, array in self.params.items()}

    def _ints(self, *shape: int) -> ShapeDtypeStruct:
        return self._array(shape, jnp.int32)

    def _array(self, shape: tuple[int, ...], dtype: Any) -> ShapeDtypeStruct:
        return ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh))


def _described(array: Any) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
