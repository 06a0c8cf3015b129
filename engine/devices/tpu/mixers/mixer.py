"""What a mixer is to the decoder, and what it computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from ....errors import DeviceError
from ....models.spec import AttentionSpec, MixerSpec, NormSpec
from ..attention import Sequences

Params = Mapping[str, jax.Array]


@dataclass(slots=True)
class Pass:
    """One pass through the decoder while it is traced: weights, tokens, and the pages, which attention replaces.

    `pages` has an array for each attention mixer, in the order of the layers. `slots` and `sequences` are given by the
    window of the cache group.
    """

    params: Params
    pages: list[jax.Array]
    slots: Mapping[int | None, jax.Array]
    sequences: Mapping[int | None, Sequences]

    def linear(self, name: str, x: jax.Array) -> jax.Array:
        """`x W^T` in float32, with the bias if there is one. `x [T, in_features]` is rounded to the weight's type."""
        weight, bias = self.params[f"{name}.weight"], self.params.get(f"{name}.bias")
        # A TPU would multiply float32 as bfloat16 otherwise.
        precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
        dimensions = (((x.ndim - 1,), (1,)), ((), ()))
        y = lax.dot_general(
            x.astype(weight.dtype), weight, dimensions, precision=precision, preferred_element_type=jnp.float32
        )
        return y if bias is None else y + bias

    def norm(self, name: str, norm: NormSpec | None, x: jax.Array, each: bool = False) -> jax.Array:
        """`x` normalized over its last dimension, or as it is where there is no norm.

        `each` of the rows of `x [T, rows, size]` has weights of its own.
        """
        if norm is None:
            return x
        if norm.kind == "layer":
            x = x - x.mean(-1, keepdims=True)
        x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + norm.eps)
        if norm.weight:
            weight = self.params[f"{name}.weight"].reshape(x.shape[1:] if each else -1)
            x = x * (1.0 + weight if norm.unit_offset else weight)
        return x + self.params[f"{name}.bias"].reshape(x.shape[1:] if each else -1) if norm.bias else x


class Mixer(Protocol):
    """A mixer of one layer."""

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """The mixer's output for `x [T, hidden] float32`, in the same shape."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What mixers are made from. `uses_kernel` says whether the TPU kernel computes a layer's attention.

    `attentions` has the window of each attention mixer, in the order they were made: the index is that of its pages.
    """

    mesh: Mesh
    uses_kernel: Callable[[AttentionSpec], bool]
    attentions: list[int | None]
    kinds: Mapping[str, Callable[[Any, str, Parts], Mixer]]

    def mixer(self, spec: MixerSpec, layer: str) -> Mixer:
        """The mixer of a residual block, whose weights' names begin with `layer`.

        Raises DeviceError for an unknown kind.
        """
        if spec.kind not in self.kinds:
            raise DeviceError(f"the tpu device has no {spec.kind}")
        return self.kinds[spec.kind](spec, layer, self)
