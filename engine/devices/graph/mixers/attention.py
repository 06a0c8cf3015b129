"""Attention with a paged KV cache.

Dimensions: S sequences of Q tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....models.spec import AttentionSpec, RopeSpec, TemperatureSpec
from ..attention import AttentionLayer, Context
from ..operations import Rotate
from ..weights import Norm
from .mixer import Parts, Tokens


class Attention:
    """Attention with the K and V of its layer or an earlier one."""

    def __init__(self, spec: AttentionSpec, layer: str, parts: Parts) -> None:
        self._spec = spec
        weights, device = parts.weights, parts.device
        self._q, self._o = parts.product(f"{layer}.q"), parts.product(f"{layer}.o")
        self._k = parts.product(f"{layer}.k") if "k" in spec.projections else None
        self._v = parts.product(f"{layer}.v") if "v" in spec.projections else None
        self._gate = parts.product(f"{layer}.q_gate") if spec.output_gate else None
        each = spec.qk_norm_over == "each"
        self._q_norm = weights.norm(f"{layer}.q_norm", spec.qk_norm, spec.num_heads if each else None)
        self._k_norm = weights.norm(f"{layer}.k_norm", spec.qk_norm, spec.num_kv_heads if each else None)
        self._v_norm = weights.norm(f"{layer}.v_norm", spec.v_norm)
        self._rotation = None if spec.rope is None else parts.ropes.index(spec.rope)
        cached = spec.cached
        self._cache = parts.caches[f"layers.{spec.kv_layer}"] if cached is None else parts.cache(layer, cached)
        self._attend, self._rotate = parts.attend, parts.rotate
        self._layer = AttentionLayer(
            spec=spec,
            block_size=parts.block_size,
            slopes=None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes, device=device),
            sinks=weights[f"{layer}.sinks"] if spec.sinks else None,
        )

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Write the tokens' K and V, then attend to all that their positions may see. `x [S, Q, hidden]`."""
        spec, cache = self._spec, self._cache
        S, Q, _ = x.shape
        group = cache.group
        q = self._placed(self._q(x, tokens).view(S, Q, spec.num_heads, spec.head_dim), self._q_norm, tokens)
        if spec.query_temperature is not None:
            q = q.float() * _temperature(spec.query_temperature, tokens.positions)[:, :, None, None]
        if self._k is not None:
            k = self._k(x, tokens).view(S, Q, spec.num_kv_heads, spec.head_dim)
            v = k if self._v is None else self._v(x, tokens).view(k.shape)
            cache.write(tokens.slots[group], self._placed(k, self._k_norm, tokens), self._v_norm(v))
        context = Context(tokens.positions, tokens.tables[group], cache.keys, cache.values, tokens.plans[group])
        result = self._attend(q.to(cache.keys.dtype), context, self._layer).flatten(2)
        if self._gate is not None:
            result = result.float() * torch.sigmoid(self._gate(x, tokens).float())
        return self._o(result, tokens)

    def _placed(self, x: Tensor, norm: Norm, tokens: Tokens) -> Tensor:
        """Queries or keys `[S, Q, heads, D]`, normalized and rotated."""
        spec = self._spec
        if not spec.qk_norm_after_rope:
            x = norm(x.flatten(2)).view(x.shape) if spec.qk_norm_over == "whole" else norm(x)
        if spec.rope is not None and self._rotation is not None:
            x = turn(self._rotate, spec.rope, x, *tokens.rotations[self._rotation])
        return norm(x) if spec.qk_norm_after_rope else x


def _temperature(temperature: TemperatureSpec, positions: Tensor) -> Tensor:
    """What queries at `positions [S, Q]` are multiplied by."""
    steps = (positions + temperature.offset) // temperature.length
    return 1 + temperature.beta * torch.log(1 + steps.float())


def turn(rotate: Rotate | None, rope: RopeSpec, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on `x [S, Q, heads, D]`, in float32: P pairs of dimensions turn by angles, `cos` and `sin [S, Q, P]`.

    `rotate` is the device's own way, if it has one.
    """
    x, size = x.float(), 2 * len(rope.inv_freq)
    turned = (rotate or _rotate)(x[..., :size], cos, sin, rope.interleaved)
    return torch.cat((turned, x[..., size:]), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    cos, sin = cos[:, :, None], sin[:, :, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
