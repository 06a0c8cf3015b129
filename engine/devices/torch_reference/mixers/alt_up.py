"""AltUp: layers that compute with one of several streams."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ....models.spec import AltUpSpec, StreamsSpec
from ..weights import Weights
from .mixer import Parts, Tokens
from .residual_block import ResidualBlock, ResidualBlocks


class AltUp(ResidualBlocks):
    """A layer."""

    def __init__(self, spec: AltUpSpec, layer: str, parts: Parts) -> None:
        self._spec, self._name, self._weights = spec, f"{layer}.alt_up", parts.weights
        super().__init__(spec.residuals, layer, parts)
        self._passive = ResidualBlock(spec.passive, layer, parts)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """What the layer adds to all streams `x [T, streams * hidden]`."""
        spec, weights = self._spec, self._weights
        rows = x.view(len(x), spec.streams, -1)
        coefficients = functional.linear(
            self._numbers(rows[:, spec.active]), weights[f"{self._name}.predict"].view(-1, spec.streams)
        )
        added = coefficients.view(-1, spec.streams, spec.streams) @ rows
        active = predicted = rows[:, spec.active] + added[:, spec.active]
        for residual in self._residuals:
            active = residual(active, tokens)
        correct = weights[f"{self._name}.correct"].view(spec.streams, spec.streams)
        factors = functional.linear(self._numbers(active), correct) + 1
        added = added + factors[..., None] * (active - predicted)[:, None]
        passive = rows[:, spec.active] + added[:, spec.active]
        if spec.scaled:
            passive = passive * weights[f"{self._name}.scale"]
        added[:, 1:] += self._passive.added(passive, tokens)[:, None]
        return added.reshape(x.shape)

    def _numbers(self, x: Tensor) -> Tensor:
        """A number for each stream, `[T, streams]`, of a row `x [T, hidden]`. Routers compute in float32."""
        x = self._weights.norm(f"{self._name}.norm", self._spec.norm, x) / x.shape[-1]
        return functional.linear(x, self._weights[f"{self._name}.router.weight"]).tanh()


def widened(spec: StreamsSpec, weights: Weights, x: Tensor) -> Tensor:
    """The streams `[T, count * hidden]` of embeddings `x [T, hidden]`."""
    return torch.cat([x, *(_as_large(spec, weights.linear(f"embed.stream.{i}", x), x) for i in _others(spec))], -1)


def narrowed(spec: StreamsSpec, weights: Weights, x: Tensor) -> Tensor:
    """One row `[T, hidden]` of the streams `x [T, count * hidden]`."""
    first, *rest = x.chunk(spec.count, -1)
    rows = [weights.linear(f"final.stream.{i}", row) for i, row in zip(_others(spec), rest, strict=True)]
    return torch.stack([first, *(_as_large(spec, row, first) for row in rows)]).mean(0)


def _others(spec: StreamsSpec) -> range:
    return range(1, spec.count)


def _as_large(spec: StreamsSpec, row: Tensor, other: Tensor) -> Tensor:
    size = row.square().mean(-1, keepdim=True).clamp(min=spec.min_square).sqrt()
    return row * other.square().mean(-1, keepdim=True).sqrt() / size
