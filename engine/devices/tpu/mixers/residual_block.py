"""A residual block: a mixer and the norms around it."""

from __future__ import annotations

import jax

from ....models.spec import ResidualBlockSpec
from .mixer import Parts, Pass


class ResidualBlock:
    """`x = sum_scale * sum_norm(sum_factor * (x + scale * post_norm(mixer(norm(x)))))`."""

    def __init__(self, spec: ResidualBlockSpec, layer: str, parts: Parts) -> None:
        self._spec = spec
        self._norms = f"{layer}.{spec.mixer.kind}"
        self._mixer = parts.mixer(spec.mixer, layer)

    def added(self, x: jax.Array, step: Pass) -> jax.Array:
        """What the residual block adds to `x [T, hidden]`."""
        x = step.norm(f"{self._norms}_norm", self._spec.norm, x)
        x = self._mixer(x, step)
        return step.norm(f"{self._norms}_post_norm", self._spec.post_norm, x) * self._spec.scale

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """The residual stream `[T, hidden]` after the residual block."""
        x = (x + self.added(x, step)) * self._spec.sum_factor
        x = step.norm(f"{self._norms}_sum_norm", self._spec.sum_norm, x)
        return x * step.params[f"{self._norms}_sum_scale"] if self._spec.sum_scale else x
