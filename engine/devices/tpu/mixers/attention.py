"""Attention of one layer: projections, norms and rope around the attention over pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ....models.spec import AttentionSpec, RopeSpec, TemperatureSpec
from ..attention import Scores, Sequences, attend, kernel_attend, write
from ..mesh import AXIS, pages_partition
from .mixer import Parts, Pass

_HEADS = PartitionSpec(None, AXIS)  # of [T, heads, head dim]


class Attention:
    """Attention with the pages of its layer. Each chip has the heads of some of the KV heads."""

    def __init__(self, spec: AttentionSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._mesh = spec, layer, parts.mesh
        self._kernel = parts.uses_kernel(spec)
        if spec.kv_layer is None:
            parts.pages[layer] = parts.keep(spec)
        self._index = parts.pages[layer if spec.kv_layer is None else f"layers.{spec.kv_layer}"]

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """Write the tokens' K and V, then attend to all that their positions may see. `x [T, hidden]`."""
        spec, layer = self._spec, self._layer
        T = x.shape[0]
        sequences, slots = step.sequences[spec.sliding_window], step.slots[spec.sliding_window]
        k = v = None
        if spec.kv_layer is None:
            keys = step.linear(f"{layer}.k", x)
            values = keys if spec.values_from_keys else step.linear(f"{layer}.v", x)
            k = self._placed("k", keys, step)
            v = step.norm(f"{layer}.v_norm", spec.v_norm, values.reshape(k.shape))
        q = self._placed("q", step.linear(f"{layer}.q", x), step)
        if spec.query_temperature:
            q = q * _temperature(spec.query_temperature, sequences.positions)[:, None, None]
        slopes = None if spec.alibi_slopes is None else jnp.array(spec.alibi_slopes, jnp.float32)
        sinks = step.params[f"{layer}.sinks"] if spec.sinks else None
        pages = step.cache[self._index]
        of_pages, by_head, everywhere = pages_partition(pages.ndim), PartitionSpec(AXIS), PartitionSpec()
        result, step.cache[self._index] = jax.shard_map(
            self._on_chip,
            mesh=self._mesh,
            in_specs=(of_pages, _HEADS, _HEADS, _HEADS, by_head, by_head, everywhere, everywhere),
            out_specs=(_HEADS, of_pages),
            check_vma=False,
        )(pages, q, k, v, slopes, sinks, slots, sequences)
        result = result.reshape(T, -1)
        if spec.output_gate:
            result *= jax.nn.sigmoid(step.linear(f"{layer}.q_gate", x))
        return step.linear(f"{layer}.o", result)

    def _placed(self, name: str, x: jax.Array, step: Pass) -> jax.Array:
        """Queries or keys `[T, heads * D]`, normalized and rotated: `[T, heads, D]`."""
        spec = self._spec
        x = x.reshape(len(x), -1, spec.head_dim)
        if not spec.qk_norm_after_rope:
            x = self._norm(f"{name}_norm", x, step)
        if spec.rope:
            x = rotate(spec.rope, x, step.rope_positions)
        return self._norm(f"{name}_norm", x, step) if spec.qk_norm_after_rope else x

    def _norm(self, name: str, x: jax.Array, step: Pass) -> jax.Array:
        """Queries or keys `x [T, heads, D]`, normalized."""
        shape = (len(x), -1) if self._spec.qk_norm_over == "whole" else x.shape
        each = self._spec.qk_norm_over == "each"
        return step.norm(f"{self._layer}.{name}", self._spec.qk_norm, x.reshape(shape), each).reshape(x.shape)

    def _on_chip(
        self,
        pages: jax.Array,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        slopes: jax.Array | None,
        sinks: jax.Array | None,
        slots: jax.Array,
        sequences: Sequences,
    ) -> tuple[jax.Array, jax.Array]:
        scores = Scores(self._spec.scale, self._spec.sliding_window, self._spec.softcap)
        if k is not None and v is not None:  # otherwise an earlier layer has written them
            pages = write(pages, slots, k, v)
        if self._kernel:
            return kernel_attend(q, pages, sequences, scores), pages
        return attend(q, pages, sequences, scores, slopes, sinks), pages


def _temperature(temperature: TemperatureSpec, positions: jax.Array) -> jax.Array:
    """What queries at `positions [T]` are multiplied by."""
    steps = (positions + temperature.offset) // temperature.length
    return 1 + temperature.beta * jnp.log(1 + steps.astype(jnp.float32))


def rotate(rope: RopeSpec, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rope on `x [T, heads, D]`: each pair `(a, b)` of dimensions turns by `position * inv_freq`.

    `positions [T] float32`.
    """
    half = len(rope.inv_freq)
    angles = (positions[:, None] * jnp.array(rope.inv_freq, jnp.float32))[:, None, :]
    cos, sin = jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if rope.interleaved else jnp.split(turned, 2, axis=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = jnp.stack(pair, -1).reshape(turned.shape) if rope.interleaved else jnp.concatenate(pair, -1)
    return jnp.concatenate((turned, rest), -1)
