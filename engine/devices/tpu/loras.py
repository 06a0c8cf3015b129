"""LoRA adapters on the chips.

An adapter that a step needs has a slot. The arrays of a matrix that adapters can change have a part for each slot,
with as many rows as the highest rank; those that an adapter does not have are zeros. A token passes the rows of its own
slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct, lax
from jax.sharding import Mesh
from numpy.typing import NDArray

from ...errors import DeviceError
from ...models.spec import DecoderSpec, tensor_shapes
from ...weights.lora import ADAPTABLE, EMBED, HEAD, LoraAdapter, LowRankUpdate
from ..limits import LoraLimits
from .mesh import replicated

_RANKS = (16, 64)  # programs are compiled for these, as far as they are lower, and for the highest rank


class Update(NamedTuple):
    """What adapters change of a matrix: `B (scale * A x) + shift` of a token's slot is added to its product with x.

    A host has the same arrays of one adapter, without the first dimension. Of the embedding, `a` is `[slots, inputs,
    rank]`: its inputs are tokens.
    """

    a: Any  # [slots, rank, inputs]
    b: Any  # [slots, rank, outputs]
    scale: Any  # [slots, rank] float32
    shift: Any  # [slots, outputs] float32


class Loras(NamedTuple):
    """All adapters in slots: the updates by the names of matrices, and what the angles of ropes are divided by."""

    updates: dict[str, Update]
    rope_factor: Any  # [slots] float32


def lora_arrays(spec: DecoderSpec, limits: LoraLimits, mesh: Mesh) -> Loras:
    """The sizes and types of the arrays, which are on every chip. The matrices of routed experts have none."""

    def array(*shape: int, dtype: str = "float32") -> ShapeDtypeStruct:
        return ShapeDtypeStruct((slots, *shape), dtype, sharding=replicated(mesh))

    slots, rank, dtype = limits.max_loras, limits.max_rank, limits.dtype
    shapes = tensor_shapes(spec)
    vocab, size = shapes["embed.weight"]
    sizes = {EMBED: (vocab, size), HEAD: (size, vocab)}
    for name, shape in shapes.items():
        if ADAPTABLE.fullmatch(name) and ".experts." not in name:
            sizes[name.removesuffix(".weight")] = shape[1], shape[0]
    updates = {
        name: Update(
            array(*(inputs, rank) if name == EMBED else (rank, inputs), dtype=dtype),
            array(rank, outputs, dtype=dtype),
            array(rank),
            array(outputs),
        )
        for name, (inputs, outputs) in sizes.items()
    }
    return Loras(updates, array())


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a pass's tokens while it is traced: `slots [T]`, -1 for none, whose ranks are up to `rank`."""

    loras: Loras
    slots: jax.Array
    rank: int

    @property
    def _chosen(self) -> jax.Array:
        """1 in the slot of a token, `[T, slots]`."""
        count = len(self.loras.rope_factor)
        return (self.slots[:, None] == jnp.arange(count)).astype(jnp.float32)

    def add(self, name: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """`y [T, outputs]` and what adapters add to the product of `x [T, inputs]` with that matrix."""
        update = self.loras.updates.get(name)
        if update is None:
            return y
        a = update.a[:, : self.rank]
        return y + self._changed(update, _product("ti,lri->tlr", x, a))

    def embedded(self, token_ids: jax.Array, x: jax.Array) -> jax.Array:
        """`x [T, size]`, the tokens' rows in the embedding, and what adapters add to them."""
        update = self.loras.updates[EMBED]
        rows = update.a[jnp.maximum(self.slots, 0), token_ids, : self.rank]
        return x + self._changed(update, rows[:, None].astype(jnp.float32))

    def stretched(self, positions: jax.Array) -> jax.Array:
        """The `positions [T]` that ropes turn by."""
        factor = jnp.where(self.slots < 0, 1.0, self.loras.rope_factor[jnp.maximum(self.slots, 0)])
        return positions / factor

    def _changed(self, update: Update, between: jax.Array) -> jax.Array:
        """What is added, `[T, outputs]`: `between [T, slots, rank]` are the products with A."""
        chosen = self._chosen
        between = between * chosen[:, :, None] * update.scale[:, : self.rank]
        shift = jnp.matmul(chosen, update.shift, precision=lax.Precision.HIGHEST)
        return _product("tlr,lro->to", between, update.b[:, : self.rank]) + shift


def _product(dimensions: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    x = x.astype(weight.dtype)
    return jnp.einsum(dimensions, x, weight, precision=precision, preferred_element_type=jnp.float32)


def rank_sizes(limits: LoraLimits | None) -> tuple[int, ...]:
    """The ranks that steps are compiled for, ascending: 0 without adapters, and `max_rank` at last."""
    if limits is None:
        return (0,)
    return (0, *(rank for rank in _RANKS if rank < limits.max_rank), limits.max_rank)


class LoraSlots:
    """The adapters in memory, by number, and which of them have slots on the chips.

    `load` may be called from any thread, everything else from the engine's.
    """

    def __init__(self, arrays: Loras, limits: LoraLimits) -> None:
        self._arrays, self._sizes = arrays, rank_sizes(limits)
        self._adapters: dict[int, LoraAdapter] = {}
        self._slots: dict[int, int] = {}  # the least recently used first
        self._free = list(range(limits.max_loras))

    def load(self, number: int, adapter: LoraAdapter) -> None:
        """Keep an adapter. Raises DeviceError for what it cannot change here."""
        if adapter.matrices:
            raise DeviceError(
                f"the tpu device cannot replace the model's {' and '.join(sorted(adapter.matrices))}, which this "
                "adapter has whole (modules_to_save): merge the adapter into its model, or take --device cpu"
            )
        for name, updates in _by_name(adapter).items():
            if name not in self._arrays.updates:
                raise DeviceError(
                    f"the tpu device cannot change {name} by adapters, which it can for attention, recurrent layers, "
                    "MLPs, routers, the embedding and the head: merge the adapter into its model, or take --device cpu"
                )
            if (rank := sum(update.rank for update in updates)) > self._sizes[-1]:
                raise DeviceError(
                    f"the adapter has parts of ranks that are {rank} together for {name}: raise --max-lora-rank to it"
                )
        self._adapters[number] = adapter

    def drop(self, number: int) -> None:
        """Forget an adapter."""
        self._adapters.pop(number, None)
        if (slot := self._slots.pop(number, None)) is not None:
            self._free.append(slot)

    def place(self, numbers: Iterable[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Give adapters slots, those of the least recently used where none is free.

        Returns the slots of all of them, and of those that have to be written.
        """
        wanted = {*numbers}
        new = {}
        for number in sorted(wanted):
            if number not in self._slots:
                if not self._free:
                    idle = next(other for other in self._slots if other not in wanted)
                    self._free.append(self._slots.pop(idle))
                new[number] = self._free.pop()
            self._slots[number] = new[number] if number in new else self._slots.pop(number)
        return {number: self._slots[number] for number in wanted}, new

    def rank(self, numbers: Iterable[int]) -> int:
        """The smallest rank that steps are compiled for and that holds those of all these adapters."""
        highest = max(
            sum(update.rank for update in updates)
            for number in numbers
            for updates in (*_by_name(self._adapters[number]).values(), ())
        )
        return self._sizes[max(1, bisect_left(self._sizes, highest))]

    def contents(self, number: int) -> Loras:
        """The arrays of a slot with that adapter."""
        by_name = _by_name(self._adapters[number])
        updates = {name: _merged(name, arrays, by_name.get(name, ())) for name, arrays in self._arrays.updates.items()}
        return Loras(updates, np.float32(self._adapters[number].rope_factor))


def _by_name(adapter: LoraAdapter) -> dict[str, list[LowRankUpdate]]:
    found: dict[str, list[LowRankUpdate]] = {}
    for update in adapter.updates:
        found.setdefault(update.name, []).append(update)
    return found


def _merged(name: str, arrays: Update, updates: Iterable[LowRankUpdate]) -> Update:
    """One update of all outputs: the ranks of parts lie behind each other."""
    merged = Update(*(np.zeros(array.shape[1:], array.dtype) for array in arrays))
    a = merged.a.T if name == EMBED else merged.a
    first = 0
    for update in updates:
        rows, outputs = (
            slice(first, first + update.rank),
            slice(update.first_output, update.first_output + len(update.b)),
        )
        a[rows] = update.a
        merged.b[rows, outputs] = update.b.T
        merged.scale[rows] = update.scale
        for vector, factor in ((update.bias, update.scale), (update.shift, 1.0)):
            if vector is not None:
                merged.shift[outputs] += factor * _rounded(vector, merged.a.dtype)
        first += update.rank
    return merged


def _rounded(vector: NDArray[np.float32], dtype: Any) -> NDArray[np.float32]:
    return vector.astype(dtype).astype(np.float32)
