"""What a mixer is to the decoder, and what it computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from ....errors import DeviceError
from ....models.spec import AttentionSpec, MixerSpec, NormSpec
from ..attention import Sequences
from ..cache import Kept
from ..grouped import Grouped
from ..inputs import StepInputs
from ..loras import Adapters
from ..products import dot

Params = Mapping[str, Any]  # each a jax.Array, or a Grouped if it is a quantized matrix


@dataclass(slots=True)
class Pass:
    """One pass through the decoder while it is traced: weights, tokens, and the cache, which mixers replace.

    `cache` has the arrays of `Parts.kept`. `slots` and `sequences` are given by the window of the cache group.
    `per_layer [T, layers, size]` is each layer's input for a token, in models with per-layer embeddings. `adapters` is
    None if no token has one. A pass that computes logits alone has no `inputs`.
    """

    params: Params
    cache: list[jax.Array]
    inputs: StepInputs | None
    slots: Mapping[int | None, jax.Array]
    sequences: Mapping[int | None, Sequences]
    adapters: Adapters | None = None
    per_layer: jax.Array | None = None

    @property
    def tokens(self) -> StepInputs:
        """The inputs of a pass through the layers."""
        assert self.inputs is not None
        return self.inputs

    @property
    def rope_positions(self) -> jax.Array:
        """The positions `[T] float32` that ropes turn by, as adapters stretch them."""
        positions = jnp.asarray(self.tokens.positions).astype(jnp.float32)
        return positions if self.adapters is None else self.adapters.stretched(positions)

    def linear(self, name: str, x: jax.Array) -> jax.Array:
        """`x W^T` in float32, with the bias if there is one, and what adapters add. `x [T, in_features]`."""
        y, bias = self.product(name, x), self.params.get(f"{name}.bias")
        y = y if bias is None else y + bias
        return y if self.adapters is None else self.adapters.add(name, x, y)

    def product(self, name: str, x: jax.Array) -> jax.Array:
        """`x W^T` in float32. `x [T, in_features]` is rounded to the weight's type."""
        weight = self.params[f"{name}.weight"]
        if isinstance(weight, Grouped):
            return weight.multiply(x)
        return dot(x, weight, 1)

    def rows(self, name: str, index: jax.Array) -> jax.Array:
        """Rows `index [T]` of the table of that name, `[T, size] float32`."""
        table = self.params[name]
        rows = table.rows(index) if isinstance(table, Grouped) else table[index]
        return rows.astype(jnp.float32)

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

    Mixers add what they keep to `kept`. `pages` has the place in it of each layer's K and V.
    """

    mesh: Mesh
    uses_kernel: Callable[[AttentionSpec], bool]
    kinds: Mapping[str, Callable[[Any, str, Parts], Mixer]]
    kept: list[Kept] = field(default_factory=list)
    pages: dict[str, int] = field(default_factory=dict)

    def keep(self, kept: Kept) -> int:
        """Its place in `Pass.cache`."""
        self.kept.append(kept)
        return len(self.kept) - 1

    def mixer(self, spec: MixerSpec, layer: str) -> Mixer:
        """The mixer of a residual block, whose weights' names begin with `layer`.

        Raises DeviceError for an unknown kind.
        """
        if spec.kind not in self.kinds:
            raise DeviceError(f"the tpu device has no {spec.kind}")
        return self.kinds[spec.kind](spec, layer, self)
