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

from ..errors import DeviceError
from ..models.spec import AttentionSpec, BranchSpec, DecoderSpec, MlpSpec, NormSpec, ParallelSpec, RopeSpec, mixers
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
        self._keys: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {}
        for index, layer in enumerate(spec.layers):
            for mixer in mixers(layer):
                if isinstance(mixer, AttentionSpec):
                    shape = (num_blocks, block_size, mixer.num_kv_heads, mixer.head_dim)
                    self._keys[f"layers.{index}"] = torch.zeros(shape, dtype=self._cache_dtype)
                    self._values[f"layers.{index}"] = torch.zeros(shape, dtype=self._cache_dtype)

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
            prefix = f"layers.{index}"
            for branch in layer:
                x = x + self._branch(prefix, branch, x, at, tables)
                if branch.sum_norm:
                    x = self._norm(f"{prefix}.{branch.mixer.kind}_sum_norm", branch.sum_norm, x)
        x = x[torch.from_numpy(logits_rows.astype(np.int64))]
        if self._spec.final_norm:
            x = self._norm("final_norm", self._spec.final_norm, x)
        if "embed.project_out.weight" in self._weights:
            x = self._linear("embed.project_out", x)
        head = self._spec.head
        logits = self._linear("embed" if head.tied else "head", x) / head.divisor
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        result: NDArray[np.float32] = logits.numpy()
        return result

    @torch.inference_mode()
    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy KV blocks in all layers, `pairs[i] = (from, to)`, shape [N, 2]."""
        source, target = torch.from_numpy(pairs.astype(np.int64)).unbind(1)
        for cache in (*self._keys.values(), *self._values.values()):
            cache[target] = cache[source]

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self._weights["embed.weight"][token_ids] * self._spec.embedding.scale
        if "embed.project_in.weight" in self._weights:
            x = self._linear("embed.project_in", x)
        if self._spec.embedding.num_positions:
            x = x + self._weights["embed.positions"][positions + self._spec.embedding.position_offset]
        return x

    def _branch(self, prefix: str, branch: BranchSpec, x: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """What a branch adds to `x [T, hidden]`."""
        kind = branch.mixer.kind
        if branch.norm:
            x = self._norm(f"{prefix}.{kind}_norm", branch.norm, x)
        match branch.mixer:
            case AttentionSpec() as attention:
                x = self._attention(prefix, attention, x, positions, tables)
            case MlpSpec() as mlp:
                x = self._mlp(prefix, mlp, x)
            case ParallelSpec(branches=branches):
                x = torch.stack([self._branch(prefix, b, x, positions, tables) for b in branches]).sum(0)
            case mixer:
                raise DeviceError(f"the torch device has no {mixer.kind}")
        if branch.post_norm:
            x = self._norm(f"{prefix}.{kind}_post_norm", branch.post_norm, x)
        return x * branch.scale

    def _mlp(self, prefix: str, mlp: MlpSpec, x: Tensor) -> Tensor:
        up = self._linear(f"{prefix}.up", x)
        if mlp.gated:
            up = _activate(mlp, self._linear(f"{prefix}.gate", x)) * up
        else:
            up = _activate(mlp, up)
        return self._linear(f"{prefix}.down", up)

    def _attention(self, prefix: str, attention: AttentionSpec, x: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        T, _ = x.shape
        q = self._linear(f"{prefix}.q", x).view(T, attention.num_heads, attention.head_dim)
        k = self._linear(f"{prefix}.k", x).view(T, attention.num_kv_heads, attention.head_dim)
        v = self._linear(f"{prefix}.v", x).view(T, attention.num_kv_heads, attention.head_dim)
        if attention.qk_norm:
            shape = (T, -1) if attention.qk_norm_over == "whole" else (T, -1, attention.head_dim)
            q = self._norm(f"{prefix}.q_norm", attention.qk_norm, q.view(shape)).view(q.shape)
            k = self._norm(f"{prefix}.k_norm", attention.qk_norm, k.view(shape)).view(k.shape)
        if attention.rope:
            q, k = _rotate(attention.rope, q, positions), _rotate(attention.rope, k, positions)
        blocks = tables[torch.arange(T), positions // self._block_size]
        self._keys[prefix][blocks, positions % self._block_size] = k.to(self._cache_dtype)
        self._values[prefix][blocks, positions % self._block_size] = v.to(self._cache_dtype)
        q = q.to(self._cache_dtype).float()
        return self._linear(f"{prefix}.o", self._attend(prefix, attention, q, positions, tables))

    def _attend(self, prefix: str, attention: AttentionSpec, q: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
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
            k = self._keys[prefix][blocks].float().view(T, tile, -1, D)
            # An unused slot may hold anything, and zero times infinity is not zero.
            v = self._values[prefix][blocks].float().view(T, tile, -1, D).masked_fill(~visible[:, :, None, None], 0.0)
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
        if attention.sinks:
            sinks = self._weights[f"{prefix}.sinks"].view(attention.num_kv_heads, -1)
            total = total + torch.exp(sinks - largest)
        return (result / total[..., None]).view(T, H * D)

    def _linear(self, prefix: str, x: Tensor) -> Tensor:
        return functional.linear(self._round(x), self._weights[f"{prefix}.weight"], self._weights.get(f"{prefix}.bias"))

    def _norm(self, prefix: str, norm: NormSpec, x: Tensor) -> Tensor:
        if norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
        if norm.weight:
            weight = self._weights[f"{prefix}.weight"]
            x = x * (1.0 + weight if norm.unit_offset else weight)
        return x + self._weights[f"{prefix}.bias"] if norm.bias else x

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self._dtype).float()


def _rotate(rope: RopeSpec, x: Tensor, positions: Tensor) -> Tensor:
    """Rope on `x [T, heads, D]`: each pair `(a, b)` of dimensions turns by `position * inv_freq`."""
    half = len(rope.inv_freq)
    angles = (positions.float()[:, None] * torch.tensor(rope.inv_freq))[:, None, :]
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if rope.interleaved else turned.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if rope.interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1)


def _activate(mlp: MlpSpec, x: Tensor) -> Tensor:
    if mlp.activation == "silu":
        return functional.silu(x)
    if mlp.activation == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if mlp.activation == "gelu_tanh" else "none")
