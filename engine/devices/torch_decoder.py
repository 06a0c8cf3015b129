"""A decoder and its paged KV cache in torch. Imports torch: only `torch_device` imports it, and late.

Dimensions: T tokens, H query heads, G KV heads, D head dim, and C cached tokens read at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ..models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec
from ..weights.dtypes import DType
from ..weights.tensor import WeightTensor, to_float32

_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Attention reads the cache in tiles of this many blocks, which start at multiples of it.
_TILE_BLOCKS = 8


class TorchDecoder:
    """Weights, KV cache and the forward pass. All of its state is here; `forward` is otherwise a pure function."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Iterable[tuple[str, WeightTensor]],
        dtype: DType,
        kv_cache_dtype: DType,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self._spec = spec
        self._dtype = _DTYPES[dtype]
        self._cache_dtype = _DTYPES[kv_cache_dtype]
        self._block_size = block_size
        # float32 that holds the dtype's values: products of two such values are exact, and their sum is float32.
        self._weights = {name: self._round(torch.from_numpy(to_float32(tensor))) for name, tensor in weights}
        shapes = [(num_blocks, block_size, a.num_kv_heads, a.head_dim) for a in (s.attention for s in spec.layers)]
        self._keys = [torch.zeros(shape, dtype=self._cache_dtype) for shape in shapes]
        self._values = [torch.zeros(shape, dtype=self._cache_dtype) for shape in shapes]

    @torch.inference_mode()
    def forward(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        logits_rows: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        """The logits after the tokens in `logits_rows`, shape [R, vocab]. Writes the tokens' K and V first.

        `token_ids [T]`, `positions [T]`, and `block_tables [T, max_blocks]` with each token's own row. A token's
        earlier positions must be in the cache or in the call.
        """
        at, tables = torch.from_numpy(positions.astype(np.int64)), torch.from_numpy(block_tables.astype(np.int64))
        x = self._embed(torch.from_numpy(token_ids.astype(np.int64)), at)
        for index, layer in enumerate(self._spec.layers):
            x = self._layer(index, layer, x, at, tables)
        x = x[torch.from_numpy(logits_rows.astype(np.int64))]
        if self._spec.final_norm:
            x = self._norm("final_norm", self._spec.final_norm, x)
        if "embed.project_out.weight" in self._weights:
            x = self._linear("embed.project_out", x)
        logits: NDArray[np.float32] = self._linear("embed" if self._spec.tied_head else "head", x).numpy()
        return logits

    @torch.inference_mode()
    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy KV blocks in all layers, `pairs[i] = (from, to)`, shape [N, 2]."""
        source, target = torch.from_numpy(pairs.astype(np.int64)).unbind(1)
        for cache in (*self._keys, *self._values):
            cache[target] = cache[source]

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self._weights["embed.weight"][token_ids]
        if "embed.project_in.weight" in self._weights:
            x = self._linear("embed.project_in", x)
        if self._spec.embedding.num_positions:
            x = x + self._weights["embed.positions"][positions + self._spec.embedding.position_offset]
        return x

    def _layer(self, index: int, layer: LayerSpec, x: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        prefix = f"layers.{index}"
        if layer.norm_placement == "pre":
            normed = self._norm(f"{prefix}.attention_norm", layer.norm, x)
            x = x + self._attention(index, layer.attention, normed, positions, tables)
            return x + self._mlp(prefix, layer.mlp, self._norm(f"{prefix}.mlp_norm", layer.norm, x))
        x = x + self._attention(index, layer.attention, x, positions, tables)
        x = self._norm(f"{prefix}.attention_norm", layer.norm, x)
        x = x + self._mlp(prefix, layer.mlp, x)
        return self._norm(f"{prefix}.mlp_norm", layer.norm, x)

    def _mlp(self, prefix: str, mlp: MlpSpec, x: Tensor) -> Tensor:
        up = self._linear(f"{prefix}.up", x)
        if mlp.gated:
            up = _activate(mlp, self._linear(f"{prefix}.gate", x)) * up
        else:
            up = _activate(mlp, up)
        return self._linear(f"{prefix}.down", up)

    def _attention(self, index: int, attention: AttentionSpec, x: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        prefix, (T, _) = f"layers.{index}", x.shape
        q = self._linear(f"{prefix}.q", x).view(T, attention.num_heads, attention.head_dim)
        k = self._linear(f"{prefix}.k", x).view(T, attention.num_kv_heads, attention.head_dim)
        v = self._linear(f"{prefix}.v", x).view(T, attention.num_kv_heads, attention.head_dim)
        if attention.qk_norm:
            q = self._norm(f"{prefix}.q_norm", attention.qk_norm, q)
            k = self._norm(f"{prefix}.k_norm", attention.qk_norm, k)
        if attention.rope:
            q, k = _rotate(attention.rope, q, positions), _rotate(attention.rope, k, positions)
        blocks = tables[torch.arange(T), positions // self._block_size]
        self._keys[index][blocks, positions % self._block_size] = k.to(self._cache_dtype)
        self._values[index][blocks, positions % self._block_size] = v.to(self._cache_dtype)
        q = q.to(self._cache_dtype).float()
        return self._linear(f"{prefix}.o", self._attend(index, attention, q, positions, tables))

    def _attend(self, index: int, attention: AttentionSpec, q: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """Softmax attention over the cache, tile by tile with a running maximum and sum.

        The recurrence is that of https://arxiv.org/abs/1805.02867. K and V always come from the cache, also those of
        this call, and the tiles start at fixed positions: how a prompt was chunked cannot show. `q [T, H, D]`,
        returns `[T, H * D]`.
        """
        T, H, D = q.shape
        tile = _TILE_BLOCKS * self._block_size
        window = attention.sliding_window
        q = q.view(T, attention.num_kv_heads, H // attention.num_kv_heads, D)
        largest = torch.full(q.shape[:-1], -torch.inf)
        total = torch.zeros(q.shape[:-1])
        result = torch.zeros(q.shape)
        first = 0 if window is None else max(0, int(positions.min()) - window + 1) // tile
        for start in range(first * tile, int(positions.max()) + 1, tile):
            cached = start + torch.arange(tile)
            visible = cached <= positions[:, None]
            if window is not None:
                visible &= cached > positions[:, None] - window
            # Positions past the table's end are invisible; any block can stand in for theirs.
            columns = (cached[:: self._block_size] // self._block_size).clamp(max=tables.shape[1] - 1)
            blocks = tables[:, columns]
            k = self._keys[index][blocks].float().view(T, tile, -1, D)
            # An unused slot may hold anything, and zero times infinity is not zero.
            v = self._values[index][blocks].float().view(T, tile, -1, D).masked_fill(~visible[:, :, None, None], 0.0)
            scores = torch.einsum("tghd,tcgd->tghc", q, k) * attention.scale
            if attention.softcap is not None:
                scores = attention.softcap * torch.tanh(scores / attention.softcap)
            if attention.alibi_slopes is not None:
                slopes = torch.tensor(attention.alibi_slopes).view(attention.num_kv_heads, -1, 1)
                scores = scores + slopes * (cached - positions[:, None])[:, None, None, :]
            scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
            # Finite even where a token sees nothing of this tile, so that no difference of infinities arises.
            new_largest = torch.maximum(largest, scores.amax(-1)).clamp(min=torch.finfo(torch.float32).min)
            shrink = torch.exp(largest - new_largest)
            weights = torch.exp(scores - new_largest[..., None])
            total = total * shrink + weights.sum(-1)
            result = result * shrink[..., None] + torch.einsum("tghc,tcgd->tghd", weights, v)
            largest = new_largest
        return (result / total[..., None]).view(T, H * D)

    def _linear(self, prefix: str, x: Tensor) -> Tensor:
        return functional.linear(self._round(x), self._weights[f"{prefix}.weight"], self._weights.get(f"{prefix}.bias"))

    def _norm(self, prefix: str, norm: NormSpec, x: Tensor) -> Tensor:
        if norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * self._weights[f"{prefix}.weight"]
        return x + self._weights[f"{prefix}.bias"] if norm.bias else x

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self._dtype).float()


def _rotate(rope: RopeSpec, x: Tensor, positions: Tensor) -> Tensor:
    """Rope on `x [T, heads, D]`: each pair `(a, b)` of dimensions turns by `position * inv_freq`."""
    half = len(rope.inv_freq)
    angles = (positions.float()[:, None] * torch.tensor(rope.inv_freq))[:, None, :]
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _activate(mlp: MlpSpec, x: Tensor) -> Tensor:
    if mlp.activation == "silu":
        return functional.silu(x)
    if mlp.activation == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if mlp.activation == "gelu_tanh" else "none")
