"""Attention to latents in a paged cache, without expanding them.

A query is taken to where latents are, so that all heads share one key, which is the latent and the rotated key, and
their values are the latents (https://arxiv.org/abs/2405.04434, section 2.1.2: k_up is absorbed into q, v_up into o).

Dimensions: S sequences of Q tokens, H heads, L numbers of a latent, R of the rotated key, N of the rest of a key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....models.spec import AttentionSpec, LatentAttentionSpec
from ..attention import AttentionLayer, Context
from ..gpu_attention import latent_attention
from .attention import turn
from .mixer import Parts, Tokens


class LatentAttention:
    """Attention with the latents and rotated keys of its layer."""

    def __init__(self, spec: LatentAttentionSpec, layer: str, parts: Parts) -> None:
        name, weights, heads = f"{layer}.latent", parts.weights, spec.num_heads
        self._spec = spec
        self._q_down = None if spec.q_rank is None else parts.product(f"{name}_q_down")
        self._q_up = parts.product(f"{name}_q" if spec.q_rank is None else f"{name}_q_up")
        self._q_norm = weights.norm(f"{name}_q_norm", spec.norm if spec.q_rank else None)
        self._kv_down, self._o = parts.product(f"{name}_kv_down"), parts.product(f"{name}_o")
        self._kv_norm = weights.norm(f"{name}_kv_norm", spec.norm)
        self._k_up = weights[f"{name}_k_up.weight"].view(heads, spec.kv_rank, spec.nope_dim)
        self._v_up = weights[f"{name}_v_up.weight"].view(heads, spec.value_dim, spec.kv_rank)
        self._rotation, self._rotate = parts.ropes.index(spec.rope), parts.rotate
        self._cache = parts.cache(layer, spec.cached)
        of_latents = AttentionSpec(heads, 1, spec.cached.key_dim, spec.scale)
        self._layer = AttentionLayer(of_latents, parts.block_size, None, None)
        self._attend = latent_attention(parts.device, parts.block_size)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Write the tokens' latents and keys, then attend to all that their positions may see. `x [S, Q, hidden]`."""
        spec, cache = self._spec, self._cache
        turned_by = tokens.rotations[self._rotation]
        latents, keys = torch.split(self._kv_down(x, tokens), [spec.kv_rank, spec.rope_dim], -1)
        keys = turn(self._rotate, spec.rope, keys[:, :, None], *turned_by)
        cache.write(tokens.slots[cache.group], torch.cat((self._kv_norm(latents)[:, :, None], keys), -1), None)
        queries = x if self._q_down is None else self._q_norm(self._q_down(x, tokens))
        queries = torch.unflatten(self._q_up(queries, tokens), -1, (spec.num_heads, -1))
        plain, turning = torch.split(queries, [spec.nope_dim, spec.rope_dim], -1)
        within = torch.einsum("sqhn,hln->sqhl", plain.to(self._k_up.dtype), self._k_up)
        q = torch.cat((within.float(), turn(self._rotate, spec.rope, turning, *turned_by)), -1).to(cache.keys.dtype)
        group = cache.group
        context = Context(tokens.positions, tokens.tables[group], cache.keys, cache.values, tokens.plans[group])
        seen = self._attend(q, context, self._layer)
        values = torch.einsum("sqhl,hvl->sqhv", seen.to(self._v_up.dtype), self._v_up)
        return self._o(values.flatten(2), tokens)
