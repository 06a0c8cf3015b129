"""Attention to latents in pages (MLA).

Dimensions: T tokens, H heads, L numbers of a latent, R of the rotated key, N of the rest of a key, V of a value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ....models.spec import LatentAttentionSpec
from ..attention import Scores, Sequences, attend_latents, write_latents
from ..mesh import AXIS
from ..products import einsum
from .attention import rotate
from .mixer import Parts, Pass

_HEADS = PartitionSpec(None, AXIS)  # of [T, heads, L + R]


class LatentAttention:
    """Attention with the latents and rotated keys of its layer, `[pages, page_size, L + R]`, which all heads share.

    Queries are taken to where latents are, and values are made of what latents sum up to. So K and V of the heads are
    never computed. Each chip has some of the heads, and all latents.
    """

    def __init__(self, spec: LatentAttentionSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._mesh = spec, f"{layer}.latent", parts.mesh
        self._index = parts.keep(spec)

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """Write the tokens' latents and keys, then attend to all that their positions may see. `x [T, hidden]`."""
        spec = self._spec
        T, H = len(x), spec.num_heads
        latents, keys = jnp.split(self._linear("kv_down", x, step), [spec.kv_rank], axis=-1)
        latents = step.norm(f"{self._layer}_kv_norm", spec.norm, latents)
        keys = rotate(spec.rope, keys[:, None], step.rope_positions)[:, 0]
        q, turning = jnp.split(self._queries(x, step).reshape(T, H, -1), [spec.nope_dim], axis=-1)
        k_up = self._by_head("k_up", step)  # [H, L, N]
        q = einsum("thn,hln->thl", q, k_up)
        q = jnp.concatenate((q, rotate(spec.rope, turning, step.rope_positions)), axis=-1)
        everywhere = PartitionSpec()
        result, step.cache[self._index] = jax.shard_map(
            self._on_chip,
            mesh=self._mesh,
            in_specs=(everywhere, _HEADS, everywhere, everywhere, everywhere),
            out_specs=(_HEADS, everywhere),
            check_vma=False,
        )(
            step.cache[self._index],
            q,
            jnp.concatenate((latents, keys), axis=-1),
            step.slots[None],
            step.sequences[None],
        )
        values = einsum("thl,hvl->thv", result, self._by_head("v_up", step))
        return self._linear("o", values.reshape(T, -1), step)

    def _on_chip(
        self, pages: jax.Array, q: jax.Array, latents: jax.Array, slots: jax.Array, sequences: Sequences
    ) -> tuple[jax.Array, jax.Array]:
        pages = write_latents(pages, slots, latents)
        return attend_latents(q, pages, sequences, Scores(self._spec.scale, None, None), self._spec.kv_rank), pages

    def _queries(self, x: jax.Array, step: Pass) -> jax.Array:
        """`[T, H * (N + R)]`."""
        if self._spec.q_rank is None:
            return self._linear("q", x, step)
        down = step.norm(f"{self._layer}_q_norm", self._spec.norm, self._linear("q_down", x, step))
        return self._linear("q_up", down, step)

    def _by_head(self, name: str, step: Pass) -> jax.Array:
        weight = step.params[f"{self._layer}_{name}.weight"]
        return weight.reshape(self._spec.num_heads, -1, weight.shape[-1])

    def _linear(self, name: str, x: jax.Array, step: Pass) -> jax.Array:
        return step.linear(f"{self._layer}_{name}", x)
