"""Products with weights: activations are rounded to the weight's type, and sums are in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def dot(x: jax.Array, weight: jax.Array, axis: int) -> jax.Array:
    """The sums over the last dimension of `x` and one of the two of `weight`."""
    return lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((x.ndim - 1,), (axis,)), ((), ())),
        precision=_exact(weight),
        preferred_element_type=jnp.float32,
    )


def einsum(dimensions: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """The sums that `dimensions` name, as in `jnp.einsum`."""
    x = x.astype(weight.dtype)
    return jnp.einsum(dimensions, x, weight, precision=_exact(weight), preferred_element_type=jnp.float32)


def ragged(x: jax.Array, stack: jax.Array, sizes: jax.Array) -> jax.Array:
    """The first `sizes[0]` rows of `x [N, inputs]` with the first matrix of a stack, and so on, `[N, outputs]`."""
    x = x.astype(stack.dtype)
    return lax.ragged_dot(x, stack, sizes, precision=_exact(stack), preferred_element_type=jnp.float32)


def _exact(weight: jax.Array) -> lax.Precision | None:
    """A TPU would multiply float32 as bfloat16 otherwise."""
    return lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
