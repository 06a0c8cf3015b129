"""AltUp: layers that compute with one of several streams."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ....models.spec import AltUpSpec, StreamsSpec
from .mixer import Parts, Pass
from .residual_block import ResidualBlock


class AltUp:
    """A layer."""

    def __init__(self, spec: AltUpSpec, layer: str, parts: Parts) -> None:
        self._spec, self._name = spec, f"{layer}.alt_up"
        self._residuals = [ResidualBlock(residual, layer, parts) for residual in spec.residuals]
        self._passive = ResidualBlock(spec.passive, layer, parts)

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """What the layer adds to all streams `x [T, streams * hidden]`."""
        spec, params = self._spec, step.params
        rows = x.reshape(len(x), spec.streams, -1)
        predict = params[f"{self._name}.predict"].reshape(-1, spec.streams)
        coefficients = _exact_product(self._numbers(rows[:, spec.active], step), predict)
        coefficients = coefficients.reshape(-1, spec.streams, spec.streams)
        added = jnp.einsum("tab,tbh->tah", coefficients, rows, precision=lax.Precision.HIGHEST)
        active = predicted = rows[:, spec.active] + added[:, spec.active]
        for residual in self._residuals:
            active = residual(active, step)
        correct = params[f"{self._name}.correct"].reshape(spec.streams, spec.streams)
        factors = _exact_product(self._numbers(active, step), correct) + 1
        added += factors[..., None] * (active - predicted)[:, None]
        passive = rows[:, spec.active] + added[:, spec.active]
        if spec.scaled:
            passive *= params[f"{self._name}.scale"]
        added = added.at[:, 1:].add(self._passive.added(passive, step)[:, None])
        return added.reshape(x.shape)

    def _numbers(self, x: jax.Array, step: Pass) -> jax.Array:
        """A number for each stream, `[T, streams]`, of a row `x [T, hidden]`."""
        x = step.norm(f"{self._name}.norm", self._spec.norm, x) / x.shape[-1]
        return jnp.tanh(step.product(f"{self._name}.router", x))


def widened(spec: StreamsSpec, x: jax.Array, step: Pass) -> jax.Array:
    """The streams `[T, count * hidden]` of embeddings `x [T, hidden]`."""
    others = (step.linear(f"embed.stream.{i}", x) for i in range(1, spec.count))
    return jnp.concatenate([x, *(_as_large(spec, row, x) for row in others)], axis=-1)


def narrowed(spec: StreamsSpec, x: jax.Array, step: Pass) -> jax.Array:
    """One row `[T, hidden]` of the streams `x [T, count * hidden]`."""
    first, *rest = jnp.split(x, spec.count, axis=-1)
    rows = (step.linear(f"final.stream.{i}", row) for i, row in enumerate(rest, 1))
    return jnp.stack([first, *(_as_large(spec, row, first) for row in rows)]).mean(0)


def _as_large(spec: StreamsSpec, row: jax.Array, other: jax.Array) -> jax.Array:
    size = jnp.sqrt(jnp.maximum(jnp.square(row).mean(-1, keepdims=True), spec.min_square))
    return row * jnp.sqrt(jnp.square(other).mean(-1, keepdims=True)) / size


def _exact_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.matmul(x, weight.T, precision=lax.Precision.HIGHEST)
