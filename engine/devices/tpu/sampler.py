"""Logits to tokens on the device, for rows that ask for no more than a token.

The rules are the same as in `engine/devices/sampling.py`. Sums are float32 here and float64 in the reference. So a row
whose random number falls between the two roundings draws a neighbouring token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..sampling import NO_TOKEN
from .inputs import RowInputs

_BLOCK = 256  # summed on its own first, so that a sum over a large vocabulary keeps its small parts


def sample(logits: jax.Array, rows: RowInputs) -> jax.Array:
    """A token for each row of `logits [R, vocab] float32`, `[R] int32`; NO_TOKEN where the largest is not finite."""
    largest = logits.max(-1)
    best = jnp.argmax(logits, -1).astype(jnp.int32)
    draws = rows.temperature > 0
    drawn = lax.cond(draws.any(), lambda: _draw(_weights(logits, largest, rows), rows), lambda: best)
    return jnp.where(jnp.isfinite(largest), jnp.where(draws, drawn, best), NO_TOKEN)


def _weights(logits: jax.Array, largest: jax.Array, rows: RowInputs) -> jax.Array:
    """Unnormalized probabilities, the largest 1, of what min-p, top-k and top-p leave."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    weights = jnp.exp((logits - largest[:, None]) / temperature[:, None])
    weights = jnp.where(weights < rows.min_p[:, None], 0.0, weights)
    cut = ((rows.top_k > 0) | (rows.top_p < 1)).any()
    return lax.cond(cut, lambda: _keep(weights, rows), lambda: weights)


def _keep(weights: jax.Array, rows: RowInputs) -> jax.Array:
    R, V = weights.shape
    order = jnp.argsort(-weights, axis=-1, stable=True)
    rank = jnp.arange(V)
    kept = jnp.where(rows.top_k > 0, rows.top_k, V)
    ordered = jnp.where(rank < kept[:, None], jnp.take_along_axis(weights, order, -1), 0.0)
    running = _running_totals(ordered)
    enough = jnp.argmax(running >= (rows.top_p * running[:, -1])[:, None], -1) + 1
    kept = jnp.minimum(kept, jnp.where(rows.top_p < 1, enough, V))
    ranks = jnp.zeros((R, V), rank.dtype).at[jnp.arange(R)[:, None], order].set(rank, unique_indices=True)
    return jnp.where(ranks < kept[:, None], weights, 0.0)


def _draw(weights: jax.Array, rows: RowInputs) -> jax.Array:
    """The first token whose running total exceeds `uniform` of the whole; the last that has a weight if none does."""
    running, has_weight = _running_totals(weights), weights > 0
    beyond = has_weight & (running > (rows.uniform * running[:, -1])[:, None])
    last = weights.shape[-1] - 1 - jnp.argmax(has_weight[:, ::-1], -1)
    return jnp.where(beyond.any(-1), jnp.argmax(beyond, -1), last).astype(jnp.int32)


def _running_totals(weights: jax.Array) -> jax.Array:
    R, V = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -V % _BLOCK))).reshape(R, -1, _BLOCK)
    within = jnp.cumsum(blocks, -1)
    ends = jnp.cumsum(within[:, :, -1], -1)
    return (within + jnp.pad(ends, ((0, 0), (1, 0)))[:, :-1, None]).reshape(R, -1)[:, :V]
