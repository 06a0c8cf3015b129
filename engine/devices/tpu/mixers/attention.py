"""Attention of one layer: projections, norms and rope around the attention over pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ....errors import DeviceError
from ....models.spec import AttentionSpec, RopeSpec, TemperatureSpec
from ..attention import Scores, Sequences, attend, kernel_attend, write
from ..mesh import AXIS, pages_partition
from .mixer import Parts, Pass

_HEADS = PartitionSpec(None, AXIS)  # of [T, heads, head dim]


class Attention:
    """Attention with the pages of its layer. Each chip has the heads of some of the KV heads."""

    def __init__(self, spec: AttentionSpec, layer: str, parts: Parts) -> None:
        if spec.output_gate:
            raise DeviceError("the tpu device has no attention with an output gate")
        self._spec, self._layer, self._mesh = spec, layer, parts.mesh
        self._kernel = parts.uses_kernel(spec)
        self._index = len(parts.attentions)
        parts.attentions.append(spec.sliding_window)

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """Write the tokens' K and V, then attend to all that their positions may see. `x [T, hidden]`."""
        spec, layer = self._spec, self._layer
        T = x.shape[0]
        sequences, slots = step.sequences[spec.sliding_window], step.slots[spec.sliding_window]
        q = step.linear(f"{layer}.q", x).reshape(T, spec.num_heads, spec.head_dim)
        k = step.linear(f"{layer}.k", x).reshape(T, spec.num_kv_heads, spec.head_dim)
        v = step.linear(f"{layer}.v", x).reshape(T, spec.num_kv_heads, spec.head_dim)
        if not spec.qk_norm_after_rope:
            q, k = self._norm("q_norm", q, step), self._norm("k_norm", k, step)
        if spec.rope:
            q, k = _rotate(spec.rope, q, sequences.positions), _rotate(spec.rope, k, sequences.positions)
        if spec.qk_norm_after_rope:
            q, k = self._norm("q_norm", q, step), self._norm("k_norm", k, step)
        if spec.query_temperature:
            q = q * _temperature(spec.query_temperature, sequences.positions)[:, None, None]
        slopes = None if spec.alibi_slopes is None else jnp.array(spec.alibi_slopes, jnp.float32)
        sinks = step.params[f"{layer}.sinks"] if spec.sinks else None
        pages = step.pages[self._index]
        of_pages, by_head, everywhere = pages_partition(pages.ndim), PartitionSpec(AXIS), PartitionSpec()
        result, step.pages[self._index] = jax.shard_map(
            self._on_chip,
            mesh=self._mesh,
            in_specs=(of_pages, _HEADS, _HEADS, _HEADS, by_head, by_head, everywhere, everywhere),
            out_specs=(_HEADS, of_pages),
            check_vma=False,
        )(pages, q, k, v, slopes, sinks, slots, sequences)
        return step.linear(f"{layer}.o", result.reshape(T, -1))

    def _norm(self, name: str, x: jax.Array, step: Pass) -> jax.Array:
        """Queries or keys `x [T, heads, D]`, normalized."""
        shape = (len(x), -1) if self._spec.qk_norm_over == "whole" else x.shape
        each = self._spec.qk_norm_over == "each"
        return step.norm(f"{self._layer}.{name}", self._spec.qk_norm, x.reshape(shape), each).reshape(x.shape)

    def _on_chip(
        self,
        pages: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        slopes: jax.Array | None,
        sinks: jax.Array | None,
        slots: jax.Array,
        sequences: Sequences,
    ) -> tuple[jax.Array, jax.Array]:
        scores = Scores(self._spec.scale, self._spec.sliding_window, self._spec.softcap)
        pages = write(pages, slots, k, v)
        if self._kernel:
            return kernel_attend(q, pages, sequences, scores), pages
        return attend(q, pages, sequences, scores, slopes, sinks), pages


def _temperature(temperature: TemperatureSpec, positions: jax.Array) -> jax.Array:
    """What queries at `positions [T]` are multiplied by."""
    steps = (positions + temperature.offset) // temperature.length
    return 1 + temperature.beta * jnp.log(1 + steps.astype(jnp.float32))


def _rotate(rope: RopeSpec, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rope on `x [T, heads, D]`: each pair `(a, b)` of dimensions turns by `position * inv_freq`."""
    half = len(rope.inv_freq)
    angles = (positions.astype(jnp.float32)[:, None] * jnp.array(rope.inv_freq, jnp.float32))[:, None, :]
    cos, sin = jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if rope.interleaved else jnp.split(turned, 2, axis=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = jnp.stack(pair, -1).reshape(turned.shape) if rope.interleaved else jnp.concatenate(pair, -1)
    return jnp.concatenate((turned, rest), -1)
