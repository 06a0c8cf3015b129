"""AltUp: layers that compute with one of several streams."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ....models.spec import AltUpSpec, StreamsSpec
from ..weights import Weights
from .mixer import Parts, Tokens
from .residual_block import ResidualBlock


class AltUp:
    """A layer."""

    def __init__(self, spec: AltUpSpec, layer: str, parts: Parts) -> None:
        name, weights, count = f"{layer}.alt_up", parts.weights, spec.streams
        self._spec = spec
        self._norm = weights.norm(f"{name}.norm", spec.norm)
        self._router = weights[f"{name}.router.weight"]
        self._predict = weights[f"{name}.predict"].view(-1, count)
        self._correct = weights[f"{name}.correct"].view(count, count)
        self._scale = weights[f"{name}.scale"] if spec.scaled else None
        self._residuals = [ResidualBlock(residual, layer, parts) for residual in spec.residuals]
        self._passive = ResidualBlock(spec.passive, layer, parts)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """What the layer adds to all streams `x [S, Q, streams * hidden]`."""
        spec = self._spec
        rows = torch.unflatten(x, -1, (spec.streams, -1))
        row = rows[:, :, spec.active]
        coefficients = functional.linear(self._numbers(row), self._predict)
        added = torch.unflatten(coefficients, -1, (spec.streams, -1)) @ rows
        active = predicted = row + added[:, :, spec.active]
        for residual in self._residuals:
            active = residual(active, tokens)
        factors = functional.linear(self._numbers(active), self._correct) + 1
        added = added + factors[..., None] * (active - predicted)[:, :, None]
        passive = row + added[:, :, spec.active]
        if self._scale is not None:
            passive = passive * self._scale
        others = self._passive.added(passive, tokens)[:, :, None]
        return torch.cat((added[:, :, :1], added[:, :, 1:] + others), 2).flatten(-2)

    def _numbers(self, x: Tensor) -> Tensor:
        """A number for each stream, `[S, Q, streams]`, of a row `x [S, Q, hidden]`. Routers compute in float32."""
        return functional.linear(self._norm(x) / x.shape[-1], self._router).tanh()


class Streams:
    """From embeddings to streams, and from the last layer's streams to one row."""

    def __init__(self, spec: StreamsSpec, weights: Weights) -> None:
        self._spec = spec
        others = range(1, spec.count)
        self._embed = [weights.linear(f"embed.stream.{i}") for i in others]
        self._final = [weights.linear(f"final.stream.{i}") for i in others]

    def widened(self, x: Tensor) -> Tensor:
        """The streams `[..., count * hidden]` of embeddings `x [..., hidden]`."""
        return torch.cat([x, *(self._as_large(linear(x), x) for linear in self._embed)], -1)

    def narrowed(self, x: Tensor) -> Tensor:
        """One row `[..., hidden]` of the streams `x [..., count * hidden]`."""
        first, *rest = x.chunk(self._spec.count, -1)
        rows = [linear(row) for linear, row in zip(self._final, rest, strict=True)]
        return torch.stack([first, *(self._as_large(row, first) for row in rows)]).mean(0)

    def _as_large(self, row: Tensor, other: Tensor) -> Tensor:
        row = row.float()
        size = row.square().mean(-1, keepdim=True).clamp(min=self._spec.min_square).sqrt()
        return row * other.square().mean(-1, keepdim=True).sqrt() / size
