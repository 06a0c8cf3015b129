"""What layers keep of tokens and of sequences on the chips, and its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jax.sharding import Mesh

from ...models.spec import AttentionSpec, LatentAttentionSpec
from ...weights.dtypes import KvCacheDType
from .heads import Kernel, chips_sharing
from .mesh import pages_sharding, replicated, sharded


class StateShape(NamedTuple):
    """What a recurrent mixer keeps of each sequence, `[*shape] float32`. Chips share dimension `divided` out."""

    shape: tuple[int, ...]
    divided: int | None


def heads_state(mesh: Mesh, heads: int, *shape: int) -> StateShape:
    """A state `[*shape]` of each head. Chips share the heads out if they can be divided."""
    return StateShape((heads, *shape), 0 if chips_sharing(mesh.size, heads) > 1 else None)


Kept: TypeAlias = AttentionSpec | LatentAttentionSpec | StateShape


def window_of(kept: Kept) -> int | None:
    """The window of the cache group that pages are in."""
    return kept.sliding_window if isinstance(kept, AttentionSpec) else None


def cache_arrays(
    kept: Sequence[Kept],
    kernel: Kernel,
    mesh: Mesh,
    blocks: Mapping[int | None, int],
    page_size: int,
    dtype: KvCacheDType,
    num_states: int,
) -> list[ShapeDtypeStruct]:
    """The arrays of pages and states, in the order of `kept`.

    `blocks` are the pages of each cache group by its window, and `num_states` the slots, with those for padding. K and
    V are divided among the chips by heads. Latents, which all heads read, are on every chip.
    """
    arrays = []
    for one in kept:
        shape: tuple[int, ...]
        if isinstance(one, StateShape):
            sharding = replicated(mesh) if one.divided is None else sharded(mesh, one.divided + 1)
            arrays.append(ShapeDtypeStruct((num_states, *one.shape), jnp.float32, sharding=sharding))
        elif isinstance(one, LatentAttentionSpec):
            shape = blocks[None], page_size, one.cached.key_dim
            arrays.append(ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh)))
        else:
            shape = blocks[one.sliding_window], *kernel.page_shape(one, page_size)
            arrays.append(ShapeDtypeStruct(shape, dtype, sharding=pages_sharding(mesh, len(shape))))
    return arrays
