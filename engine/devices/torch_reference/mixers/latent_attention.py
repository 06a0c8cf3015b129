"""Attention to latents in a paged cache.

Dimensions: T tokens, H heads, L numbers of a latent, R of the rotated key, N of the rest of a key, C cached tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....models.spec import LatentAttentionSpec
from .attention import rotate
from .mixer import Parts, Tokens


class LatentAttention:
    """Attention with the latents `[num_blocks, block_size, L]` and the rotated keys `[.., R]` of its layer."""

    def __init__(self, spec: LatentAttentionSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._weights = spec, f"{layer}.latent", parts.weights
        self._block_size = parts.block_size
        blocks = (parts.num_blocks[spec.cached.window], parts.block_size)
        self._latents = torch.zeros((*blocks, spec.kv_rank), dtype=parts.cache_dtype)
        self._keys = torch.zeros((*blocks, spec.rope_dim), dtype=parts.cache_dtype)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Write the tokens' latents and keys, then attend to all that their positions may see. `x [T, hidden]`."""
        spec, positions = self._spec, tokens.positions
        latents, keys = torch.split(self._linear("kv_down", x), [spec.kv_rank, spec.rope_dim], dim=-1)
        latents = self._weights.norm(f"{self._layer}_kv_norm", spec.norm, latents)
        turned_by = tokens.turned_by(spec.rope)
        keys = rotate(spec.rope, keys[:, None], turned_by)[:, 0]
        tables = tokens.block_tables[spec.cached.window]
        blocks, slots = tables[torch.arange(len(x)), positions // self._block_size], positions % self._block_size
        self._latents[blocks, slots] = latents.to(self._latents.dtype)
        self._keys[blocks, slots] = keys.to(self._keys.dtype)
        queries = self._queries(x, turned_by)
        seen = [self._attend(queries[t], tables[t], int(positions[t]) + 1) for t in range(len(x))]
        return self._linear("o", torch.stack(seen))

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Copy latents and keys, if they are in blocks of that group."""
        if window == self._spec.cached.window:
            self._latents[target] = self._latents[source]
            self._keys[target] = self._keys[source]

    def copy_state(self, source: int, target: int) -> None:
        """Nothing to copy: all is in blocks."""

    def _queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """`[T, H, N + R]`, rotated."""
        spec = self._spec
        if spec.q_rank is None:
            q = self._linear("q", x)
        else:
            q = self._linear("q_up", self._weights.norm(f"{self._layer}_q_norm", spec.norm, self._linear("q_down", x)))
        plain, turning = self._parts(q.view(len(x), spec.num_heads, -1))
        return torch.cat((plain, rotate(spec.rope, turning, positions)), dim=-1)

    def _attend(self, query: Tensor, table: Tensor, count: int) -> Tensor:
        """Attention of a token with the queries `[H, N + R]` to the first `count` cached ones: `[H * value_dim]`."""
        spec = self._spec
        blocks = table[: -(-count // self._block_size)]
        latents = self._latents[blocks].float().flatten(0, 1)[:count]
        keys = self._keys[blocks].float().flatten(0, 1)[:count]
        k_up = self._weights[f"{self._layer}_k_up.weight"].view(spec.num_heads, spec.kv_rank, spec.nope_dim)
        v_up = self._weights[f"{self._layer}_v_up.weight"].view(spec.num_heads, spec.value_dim, spec.kv_rank)
        plain, turning = self._parts(query)
        scores = torch.einsum("hn,hcn->hc", plain, torch.einsum("cl,hln->hcn", latents, k_up)) + turning @ keys.T
        weights = (scores * spec.scale).softmax(-1)
        return torch.einsum("hc,hcv->hv", weights, torch.einsum("cl,hvl->hcv", latents, v_up)).flatten()

    def _parts(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """The part that rope does not change, and the part that it rotates."""
        return query[..., : self._spec.nope_dim], query[..., self._spec.nope_dim :]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self._weights.linear(f"{self._layer}_{name}", x)
