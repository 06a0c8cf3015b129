"""Attention with a paged KV cache.

Dimensions: S sequences of Q tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....errors import DeviceError
from ....models.spec import AttentionSpec, RopeSpec, TemperatureSpec
from ..attention import AttentionLayer, Context
from ..operations import Rotate
from .mixer import Parts, Tokens


class Attention:
    """Attention with the K and V of its layer, each `[slots, G, D]`: slot `block * block_size + offset`."""

    def __init__(self, spec: AttentionSpec, layer: str, parts: Parts) -> None:
        if spec.output_gate:
            raise DeviceError("graph devices have no attention with an output gate")
        self._spec, self._parts = spec, parts
        weights, device = parts.weights, parts.device
        self._q, self._k, self._v, self._o = (weights.linear(f"{layer}.{name}") for name in "qkvo")
        each = spec.qk_norm_over == "each"
        self._q_norm = weights.norm(f"{layer}.q_norm", spec.qk_norm, spec.num_heads if each else None)
        self._k_norm = weights.norm(f"{layer}.k_norm", spec.qk_norm, spec.num_kv_heads if each else None)
        self._group = parts.windows.index(spec.sliding_window)
        self._rotation = None if spec.rope is None else parts.ropes.index(spec.rope)
        self._attend = parts.attend
        self._layer = AttentionLayer(
            spec=spec,
            block_size=parts.block_size,
            slopes=None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes, device=device),
            sinks=weights[f"{layer}.sinks"] if spec.sinks else None,
        )
        self.allocate([0] * len(parts.windows))

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Write the tokens' K and V, then attend to all that their positions may see. `x [S, Q, hidden]`."""
        spec = self._spec
        S, Q, _ = x.shape
        q, k, v = self._q(x), self._k(x), self._v(x).view(S, Q, spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm_over == "whole":
            q, k = self._q_norm(q), self._k_norm(k)
        q = q.view(S, Q, spec.num_heads, spec.head_dim)
        k = k.view(S, Q, spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm_over != "whole" and not spec.qk_norm_after_rope:
            q, k = self._q_norm(q), self._k_norm(k)
        if spec.rope is not None and self._rotation is not None:
            cos, sin = tokens.rotations[self._rotation]
            rotate = self._parts.rotate or _rotate
            q, k = _turn(rotate, spec.rope, q, cos, sin), _turn(rotate, spec.rope, k, cos, sin)
        if spec.qk_norm_after_rope:
            q, k = self._q_norm(q), self._k_norm(k)
        if spec.query_temperature is not None:
            q = q.float() * _temperature(spec.query_temperature, tokens.positions)[:, :, None, None]
        slots = (tokens.slots[self._group].flatten(),)
        self._keys.index_put_(slots, k.to(self._keys.dtype).flatten(0, 1))
        self._values.index_put_(slots, v.to(self._values.dtype).flatten(0, 1))
        group = self._group
        context = Context(tokens.positions, tokens.tables[group], self._keys, self._values, tokens.plans[group])
        return self._o(self._attend(q.to(self._keys.dtype), context, self._layer).flatten(2))

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Make room for the blocks of this layer's group."""
        parts, spec = self._parts, self._spec
        shape = (num_blocks[self._group] * parts.block_size, spec.num_kv_heads, spec.head_dim)
        self._keys = torch.zeros(shape, dtype=parts.cache_dtype, device=parts.device)
        self._values = torch.zeros(shape, dtype=parts.cache_dtype, device=parts.device)

    def copy_slots(self, source: Tensor, target: Tensor, group: int) -> None:
        """Copy K and V, if they are in slots of that group."""
        if group == self._group:
            self._keys.index_put_((target,), self._keys[source])
            self._values.index_put_((target,), self._values[source])


def _temperature(temperature: TemperatureSpec, positions: Tensor) -> Tensor:
    """What queries at `positions [S, Q]` are multiplied by."""
    steps = (positions + temperature.offset) // temperature.length
    return 1 + temperature.beta * torch.log(1 + steps.float())


def _turn(rotate: Rotate, rope: RopeSpec, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on `x [S, Q, heads, D]`, in float32: P pairs of dimensions turn by angles, `cos` and `sin [S, Q, P]`."""
    x, size = x.float(), 2 * len(rope.inv_freq)
    turned = rotate(x[..., :size], cos, sin, rope.interleaved)
    return torch.cat((turned, x[..., size:]), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    cos, sin = cos[:, :, None], sin[:, :, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
