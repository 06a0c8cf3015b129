"""A residual block: a mixer and the norms around it."""

from __future__ import annotations

from torch import Tensor

from ....models.spec import ParallelSpec, ResidualBlockSpec
from .mixer import Parts, Tokens


class ResidualBlock:
    """`x = sum_scale * sum_norm(sum_factor * (x + scale * post_norm(mixer(norm(x)))))`, of a float32 stream `x`."""

    def __init__(self, spec: ResidualBlockSpec, layer: str, parts: Parts, adds_up: bool = True) -> None:
        names = f"{layer}.{spec.mixer.kind}"
        self._norm = parts.weights.norm(f"{names}_norm", spec.norm)
        self._post_norm = parts.weights.norm(f"{names}_post_norm", spec.post_norm)
        self._sum_norm = parts.weights.norm(f"{names}_sum_norm", spec.sum_norm)
        self._scale, self._sum_factor = spec.scale, spec.sum_factor
        self._sum_scale = parts.weights[f"{names}_sum_scale"] if spec.sum_scale else None
        # Norms are no sums: what lies before one is added up there, and all else once for the residual block.
        within = isinstance(spec.mixer, ParallelSpec) and any(residual.post_norm for residual in spec.mixer.residuals)
        self._add_up = None if within or not adds_up else parts.add_up
        self._mixer = parts.mixer(spec.mixer, layer)

    def added(self, x: Tensor, tokens: Tokens) -> Tensor:
        """What the residual block adds to `x [S, Q, hidden]`."""
        added = self._mixer(self._norm(x), tokens)
        if self._add_up is not None:
            added = self._add_up(added)
        return self._post_norm(added).float() * self._scale

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The residual stream `[S, Q, hidden]` after the residual block."""
        x = self._sum_norm((x + self.added(x, tokens)) * self._sum_factor)
        return x if self._sum_scale is None else x * self._sum_scale
