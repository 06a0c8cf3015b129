"""Attention over blocks of the KV cache: what a device may do in its own way, and the way that every device can.

Dimensions: S sequences of Q tokens, H query heads, G KV heads, D head dim, W blocks in a row of a block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...models.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What is the same in all launches of a layer. `slopes [H]` are ALiBi's and `sinks [H]` learned, both float32."""

    spec: AttentionSpec
    block_size: int
    slopes: Tensor | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class Context:
    """What the tokens of a launch attend to: their own K and V are in the cache already.

    The token at `positions [S, Q]` sees the positions up to its own, within the layer's window. Position p of sequence
    s is slot `p % block_size` of block `tables[s, p // block_size]`, `tables [S, W]`. `keys` are `[blocks * block_size,
    G, D]`, and `values` as long or shorter. What no token sees may be anything, NaN too. `plan` is what `PlanAttention`
    gave.
    """

    positions: Tensor
    tables: Tensor
    keys: Tensor
    values: Tensor
    plan: Sequence[Tensor] = ()


class Attend(Protocol):
    """A way to attend. It is compiled as a part of a launch: shapes are fixed and nothing depends on values."""

    def __call__(self, q: Tensor, context: Context, layer: AttentionLayer) -> Tensor:
        """`q [S, Q, H, D]` in the cache's dtype; returns `[S, Q, H, size of a value]` in any float dtype."""
        ...


class PlanAttention(Protocol):
    """Computes what an attention function needs for a launch, once for all layers that share a cache group."""

    def __call__(
        self, positions: Tensor, tables: Tensor, block_size: int, num_blocks: int, window: int | None
    ) -> Sequence[Tensor]:
        """`positions [S, Q]` and `tables [S, W]` as in `Context`. The group's cache has `num_blocks` blocks."""
        ...


def no_plan(
    positions: Tensor, tables: Tensor, block_size: int, num_blocks: int, window: int | None
) -> Sequence[Tensor]:
    """Nothing."""
    return ()


def gather(context: Context, layer: AttentionLayer, num_queries: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the tables' blocks hold: K and V `[S, C, G, D]`, and of each the distance to each query, `[S, Q, C]`.

    Last comes what each query sees, `[S, Q, C]`. C is the tables' width in tokens, or what a window needs of it. What
    no query sees is 0 in V: an unused slot may hold anything, and zero times infinity is not zero.
    """
    spec, block_size = layer.spec, layer.block_size
    S, G, D = len(context.tables), spec.num_kv_heads, spec.head_dim
    positions, tables = context.positions, context.tables
    W = tables.shape[1]
    first = torch.zeros_like(positions[:, :1])
    if spec.sliding_window is not None:
        # Tokens of a sequence follow one another: all that they see begins with the window of the first one.
        seen = min(W, (spec.sliding_window + num_queries - 2) // block_size + 2)
        first = (positions[:, :1] - (spec.sliding_window - 1)).clamp(min=0) // block_size
        columns = first + torch.arange(seen, device=tables.device)
        tables, W = tables.gather(1, columns.clamp(max=W - 1)), seen
    C = W * block_size
    cached = first * block_size + torch.arange(C, device=tables.device)  # [S, C]
    distance = positions[:, :, None] - cached[:, None, :]  # [S, Q, C]
    visible = distance >= 0
    if spec.sliding_window is not None:
        visible = visible & (distance < spec.sliding_window)
    k = context.keys.view(-1, block_size, G, D)[tables].view(S, C, G, D)
    used = visible.any(1)[:, :, None, None]
    values = torch.unflatten(context.values, 0, (-1, block_size))[tables]
    v = values.view(S, C, *values.shape[3:]).masked_fill(~used, 0.0)
    return k, v, distance, visible


def gather_attention(q: Tensor, context: Context, layer: AttentionLayer) -> Tensor:
    """Gather the tables' blocks and attend to all of them at once, in float32. Any device can, and others compare."""
    spec = layer.spec
    S, Q, H, D = q.shape
    G = spec.num_kv_heads
    k, v, distance, visible = gather(context, layer, Q)
    # What is multiplied and divided is as narrow as can be: D values a token, where scores are C.
    scores = torch.einsum("sqghd,scgd->sghqc", q.float().view(S, Q, G, H // G, D) * spec.scale, k.float())
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if layer.slopes is not None:
        scores = scores - layer.slopes.view(G, -1, 1, 1) * distance[:, None, None]
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    if layer.sinks is not None:
        largest = torch.maximum(largest, layer.sinks.view(G, -1, 1, 1))
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    if layer.sinks is not None:
        total = total + torch.exp(layer.sinks.view(G, -1, 1, 1) - largest)
    result = torch.einsum("sghqc,scgd->sghqd", weights, v.float()) / total
    return result.permute(0, 3, 1, 2, 4).reshape(S, Q, H, -1)
