"""LAuReL."""

from __future__ import annotations

import jax

from ....models.spec import LaurelSpec
from .mixer import Parts, Pass


class Laurel:
    """`x + norm(up(down(x)))`."""

    def __init__(self, spec: LaurelSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer = spec, f"{layer}.laurel"

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """The mixer's result, `[T, hidden]`."""
        learned = step.linear(f"{self._layer}_up", step.linear(f"{self._layer}_down", x))
        return x + step.norm(f"{self._layer}_out_norm", self._spec.norm, learned)
