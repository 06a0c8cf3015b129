"""LoRA adapters on the chips.

An adapter that a step needs has a slot. The arrays of a matrix that adapters can change have a part for each slot,
with as many rows as the highest rank; those that an adapter does not have are zeros. A token passes the rows of its own
slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
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
from ..expert_adapters import NO_ROOM_FOR_EXPERTS, expert_name, of_expert
from ..limits import LoraLimits
from .mesh import replicated
from .products import einsum
from .stacks import expert_shapes

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


class ExpertUpdate(NamedTuple):
    """What adapters change of a stack of experts' matrices: `B A x` of a token's slot is added to its product with x.

    A host has the same arrays of one adapter, without the dimension of slots.
    """

    a: Any  # [experts, inputs, slots, rank]
    b: Any  # [experts, slots, rank, outputs], with the scale


class Loras(NamedTuple):
    """All adapters in slots: the updates by the names of matrices, those of experts by the names of stacks, and what
    the angles of ropes are divided by.
    """

    updates: dict[str, Update]
    experts: dict[str, ExpertUpdate]
    rope_factor: Any  # [slots] float32

    @property
    def slot_axes(self) -> Loras:
        """Which dimension of each array is that of slots."""
        updates = {name: Update(0, 0, 0, 0) for name in self.updates}
        return Loras(updates, {name: ExpertUpdate(2, 1) for name in self.experts}, 0)

    @property
    def one_slot(self) -> Loras:
        """The sizes and types of the arrays of one adapter."""

        def of_one(array: jax.Array, axis: int) -> ShapeDtypeStruct:
            shape = *array.shape[:axis], *array.shape[axis + 1 :]
            return ShapeDtypeStruct(shape, array.dtype, sharding=array.sharding)

        one: Loras = jax.tree.map(of_one, self, self.slot_axes)
        return one


def lora_arrays(spec: DecoderSpec, limits: LoraLimits, mesh: Mesh) -> Loras:
    """The sizes and types of the arrays, which are on every chip."""

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
    described = partial(ShapeDtypeStruct, dtype=dtype, sharding=replicated(mesh))
    experts = {
        name.removesuffix(".weight"): ExpertUpdate(
            described((count, inputs, slots, rank)), described((count, slots, rank, outputs))
        )
        for name, (count, inputs, outputs) in expert_shapes(shapes).items()
        if limits.of_experts
    }
    return Loras(updates, experts, array())


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a pass's tokens while it is traced: `slots [T]`, -1 for none, whose ranks are up to `rank`."""

    loras: Loras
    slots: jax.Array
    rank: int

    @property
    def chosen(self) -> jax.Array:
        """1 in the slot of a token, `[T, slots]`."""
        count = len(self.loras.rope_factor)
        return (self.slots[:, None] == jnp.arange(count)).astype(jnp.float32)

    def add(self, name: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """`y [T, outputs]` and what adapters add to the product of `x [T, inputs]` with that matrix."""
        update = self.loras.updates.get(name)
        if update is None:
            return y
        a = update.a[:, : self.rank]
        return y + self._changed(update, einsum("ti,lri->tlr", x, a))

    def of_experts(self, prefix: str) -> dict[str, ExpertUpdate]:
        """The updates of a layer's stacks, whose names begin with `prefix`, by what is behind it."""
        updates = self.loras.experts.items()
        return {name.removeprefix(prefix): update for name, update in updates if name.startswith(prefix)}

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
        chosen = self.chosen
        between = between * chosen[:, :, None] * update.scale[:, : self.rank]
        shift = jnp.matmul(chosen, update.shift, precision=lax.Precision.HIGHEST)
        return einsum("tlr,lro->to", between, update.b[:, : self.rank]) + shift


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
            if expert := of_expert(name):
                if expert[0] not in self._arrays.experts:
                    raise DeviceError(NO_ROOM_FOR_EXPERTS.format(name=name))
                if any(update.bias is not None or update.shift is not None for update in updates):
                    raise DeviceError(f"the tpu device cannot change the bias of {name} by adapters: take --device cpu")
            elif name not in self._arrays.updates:
                raise DeviceError(
                    f"the tpu device cannot change {name} by adapters, which it can for attention, recurrent layers, "
                    "MLPs, experts, routers, the embedding and the head: merge the adapter into its model, or take "
                    "--device cpu"
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
        experts = {name: _stacked(name, arrays, by_name) for name, arrays in self._arrays.experts.items()}
        return Loras(updates, experts, np.float32(self._adapters[number].rope_factor))


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


def _stacked(name: str, arrays: ExpertUpdate, by_name: Mapping[str, Iterable[LowRankUpdate]]) -> ExpertUpdate:
    """The updates of all experts, in the layout of a stack without slots."""
    (count, inputs, _, rank), outputs, dtype = arrays.a.shape, arrays.b.shape[-1], arrays.a.dtype
    stack = ExpertUpdate(np.zeros((count, inputs, rank), dtype), np.zeros((count, rank, outputs), dtype))
    for expert in range(count):
        first = 0
        for update in by_name.get(expert_name(name, expert), ()):
            last, output = first + update.rank, update.first_output
            stack.a[expert, :, first:last] = update.a.T
            stack.b[expert, first:last, output : output + len(update.b)] = update.scale * update.b.T
            first = last
    return stack


def _rounded(vector: NDArray[np.float32], dtype: Any) -> NDArray[np.float32]:
    return vector.astype(dtype).astype(np.float32)
