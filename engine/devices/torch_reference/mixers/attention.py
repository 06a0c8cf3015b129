"""Attention over a paged KV cache.

Dimensions: T tokens, H query heads, G KV heads, D head dim, and C cached tokens read at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....models.spec import AttentionSpec, RopeSpec, TemperatureSpec
from .mixer import Parts, Tokens

# Attention reads the cache in tiles of this many blocks, which start at multiples of it.
_TILE_BLOCKS = 8


class Attention:
    """Attention with the K and V of its layer or an earlier one, each `[num_blocks, block_size, G, D]`."""

    def __init__(self, spec: AttentionSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._weights = spec, layer, parts.weights
        self._block_size = parts.block_size
        if spec.kv_layer is None:
            shape = (parts.num_blocks[spec.sliding_window], parts.block_size, spec.num_kv_heads, spec.head_dim)
            parts.caches[layer] = (
                torch.zeros(shape, dtype=parts.cache_dtype),
                torch.zeros(shape, dtype=parts.cache_dtype),
            )
        self._keys, self._values = parts.caches[layer if spec.kv_layer is None else f"layers.{spec.kv_layer}"]

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Write the tokens' K and V, then attend to all that their positions may see. `x [T, hidden]`."""
        spec, positions = self._spec, tokens.positions
        T, _ = x.shape
        tables = tokens.block_tables[spec.sliding_window]
        if spec.kv_layer is None:
            k = self._weights.linear(f"{self._layer}.k", x)
            v = k if spec.values_from_keys else self._weights.linear(f"{self._layer}.v", x)
            k = self._placed("k", k, tokens)
            v = self._weights.norm(f"{self._layer}.v_norm", spec.v_norm, v.view(k.shape))
            blocks = tables[torch.arange(T), positions // self._block_size]
            self._keys[blocks, positions % self._block_size] = k.to(self._keys.dtype)
            self._values[blocks, positions % self._block_size] = v.to(self._values.dtype)
        q = self._placed("q", self._weights.linear(f"{self._layer}.q", x), tokens)
        if spec.query_temperature:
            q = q * temperature_at(spec.query_temperature, positions)[:, None, None]
        q = q.to(self._keys.dtype).float()
        ends = positions + 1 if tokens.visible_until is None or not spec.two_way else tokens.visible_until
        result = self._attend(q, positions, ends, tables)
        if spec.output_gate:
            result = result * torch.sigmoid(self._weights.linear(f"{self._layer}.q_gate", x))
        return self._weights.linear(f"{self._layer}.o", result)

    def _placed(self, name: str, x: Tensor, tokens: Tokens) -> Tensor:
        """Queries or keys `[T, heads * D]`, normalized and rotated: `[T, heads, D]`."""
        spec = self._spec
        x = x.view(len(x), -1, spec.head_dim)
        if not spec.qk_norm_after_rope:
            x = self._norm(f"{name}_norm", x)
        if spec.rope:
            x = rotate(spec.rope, x, tokens.turned_by(spec.rope))
        return self._norm(f"{name}_norm", x) if spec.qk_norm_after_rope else x

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Copy K and V, if they are in blocks of that group and no other layer's."""
        if window != self._spec.sliding_window or self._spec.kv_layer is not None:
            return
        for cache in (self._keys, self._values):
            cache[target] = cache[source]

    def copy_state(self, source: int, target: int) -> None:
        """Nothing to copy: all is in blocks."""

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """Queries or keys `x [T, heads, D]`, normalized."""
        shape = (len(x), -1) if self._spec.qk_norm_over == "whole" else x.shape
        each = self._spec.qk_norm_over == "each"
        return self._weights.norm(f"{self._layer}.{name}", self._spec.qk_norm, x.view(shape), each).view(x.shape)

    def _attend(self, q: Tensor, positions: Tensor, ends: Tensor, tables: Tensor) -> Tensor:
        """Softmax attention over the cache up to `ends [T]`, tile by tile with a running maximum and sum.

        The recurrence is from https://arxiv.org/abs/1805.02867. K and V always come from the cache, also those of this
        call, and the tiles start at fixed positions. So the chunks of a prompt make no difference. `q [T, H, D]`,
        returns `[T, H * D]`.
        """
        spec = self._spec
        T, H, D = q.shape
        tile = _TILE_BLOCKS * self._block_size
        window = spec.sliding_window
        q = q.view(T, spec.num_kv_heads, H // spec.num_kv_heads, D)
        largest = torch.full(q.shape[:-1], -torch.inf)
        total = torch.zeros(q.shape[:-1])
        result = torch.zeros(q.shape)
        first = 0 if window is None else max(0, int(positions.min()) - window + 1) // tile
        for start in range(first * tile, int(ends.max()), tile):
            cached = start + torch.arange(tile)
            visible = cached < ends[:, None]
            if window is not None:
                visible &= cached > positions[:, None] - window
            # Positions past the table's end are invisible; any block can stand in for theirs.
            columns = (cached[:: self._block_size] // self._block_size).clamp(max=tables.shape[1] - 1)
            blocks = tables[:, columns]
            k = self._keys[blocks].float().view(T, tile, -1, D)
            # An unused slot may hold anything, and zero times infinity is not zero.
            v = self._values[blocks].float().view(T, tile, -1, D).masked_fill(~visible[:, :, None, None], 0.0)
            scores = torch.einsum("tghd,tcgd->tghc", q, k) * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if spec.alibi_slopes is not None:
                slopes = torch.tensor(spec.alibi_slopes).view(spec.num_kv_heads, -1, 1)
                scores = scores - slopes * (cached - positions[:, None]).abs()[:, None, None, :]
            scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
            # Finite even where a token sees nothing of this tile, so that no difference of infinities arises.
            new_largest = torch.maximum(largest, scores.amax(-1)).clamp(min=torch.finfo(torch.float32).min)
            shrink = torch.exp(largest - new_largest)
            weights = torch.exp(scores - new_largest[..., None])
            total = total * shrink + weights.sum(-1)
            result = result * shrink[..., None] + torch.einsum("tghc,tcgd->tghd", weights, v)
            largest = new_largest
        if spec.sinks:
            sinks = self._weights[f"{self._layer}.sinks"].view(spec.num_kv_heads, -1)
            total = total + torch.exp(sinks - largest)
        return (result / total[..., None]).view(T, H * D)


def temperature_at(temperature: TemperatureSpec, positions: Tensor) -> Tensor:
    """What queries at `positions [T]` are multiplied by."""
    steps = (positions + temperature.offset) // temperature.length
    return 1 + temperature.beta * torch.log(1 + steps.float())


def rotate(rope: RopeSpec, x: Tensor, positions: Tensor) -> Tensor:
    """Rope on `x [T, heads, D]`: each pair `(a, b)` of dimensions turns by `position * inv_freq`.

    `positions [T, pairs]`, or `[T, 1]`.
    """
    half = len(rope.inv_freq)
    angles = (positions.float() * torch.tensor(rope.inv_freq))[:, None, :]
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if rope.interleaved else turned.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if rope.interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1)
