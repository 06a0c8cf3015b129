"""Attention by FlexAttention over the paged cache (https://arxiv.org/abs/2412.05496): no K or V is gathered.

The whole cache is one long sequence of keys. The block tables say which of its blocks a query reads. A block of keys is
a block of the cache; its place in the table tells its place in its sequence.

Dimensions: S sequences of Q tokens, H query heads, G KV heads, D head dim, W blocks in a row of a block table.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from .attention import AttentionLayer, Context, gather_attention

_QUERY_BLOCK = 128
_NARROWEST_HEAD = 16  # that Triton multiplies


def plan_flex_attention(
    positions: Tensor, tables: Tensor, block_size: int, num_blocks: int, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """For each of N blocks of queries how many blocks of the cache it reads, `[S, 1, N]`, and which.

    These are the first ones of `[S, 1, N, num_blocks]`: FlexAttention wants room for all blocks of the cache. Last come
    the places of all blocks in each sequence, `[S, num_blocks]`: behind its end, if they are another's.

    It is not to be compiled together with the attention: torch (2.11) then computes the places again in its kernel for
    attention, where it cannot compile all of that, and gives the dimension of 1 a stride of 0, so that all sequences
    read the blocks of the first one.
    """
    S, Q = positions.shape
    W = tables.shape[1]
    # Padding repeats the last query, which reads what that one reads.
    queries = functional.pad(positions, (0, -Q % _QUERY_BLOCK), mode="replicate").view(S, -1, _QUERY_BLOCK)
    last = (queries.amax(-1) // block_size).clamp(max=W - 1)
    first = torch.zeros_like(last)
    if window is not None:
        first = ((queries.amin(-1) - (window - 1)).clamp(min=0) // block_size).minimum(last)
    columns = torch.arange(W, device=tables.device)
    read = (first[:, :, None] + columns).clamp(max=W - 1)
    blocks = tables[:, None].expand(-1, read.shape[1], -1).gather(2, read)
    blocks = functional.pad(blocks, (0, max(num_blocks - W, 0))).int()
    # The block for padding is in a table several times: its first place counts.
    places = torch.full((S, num_blocks), W, device=tables.device)
    places = places.scatter_reduce(1, tables, columns.expand(S, W), "amin")
    return (last - first + 1).int()[:, None], blocks[:, None], places


def paged_flex_attention(q: Tensor, context: Context, layer: AttentionLayer) -> Tensor:
    """`q [S, Q, H, D]`, returns `[S, Q, H, D]`.

    A launch that is not compiled is left to `gather_attention`: FlexAttention would then compute the scores of the
    whole cache. So are heads that are too narrow for it.
    """
    if not torch.compiler.is_compiling() or q.shape[-1] < _NARROWEST_HEAD:
        return gather_attention(q, context, layer)
    spec, block_size = layer.spec, layer.block_size
    positions, H = context.positions, q.shape[2]
    _clear_unused(context, block_size)
    slopes = layer.slopes
    window, softcap = spec.sliding_window, spec.softcap
    count, blocks, places = context.plan

    def distance(s: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return positions[s, query] - (places[s, slot // block_size] * block_size + slot % block_size)

    def is_seen(s: Tensor, h: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        behind = distance(s, query, slot)
        return behind >= 0 if window is None else (behind >= 0) & (behind < window)

    def score(value: Tensor, s: Tensor, h: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        if softcap is not None:
            value = softcap * torch.tanh(value / softcap)
        return value if slopes is None else value - slopes[h] * distance(s, query, slot)

    result, aux = flex_attention(
        q.transpose(1, 2),
        context.keys.transpose(0, 1)[None],
        context.values.transpose(0, 1)[None],
        score_mod=None if softcap is None and slopes is None else score,
        block_mask=BlockMask.from_kv_blocks(
            count,
            blocks,
            BLOCK_SIZE=(_QUERY_BLOCK, block_size),
            mask_mod=is_seen,
            seq_lengths=(q.shape[1], context.keys.shape[0]),
            compute_q_blocks=False,
        ),
        scale=spec.scale,
        enable_gqa=spec.num_kv_heads != H,
        return_aux=AuxRequest(lse=layer.sinks is not None),
    )
    if layer.sinks is not None and aux.lse is not None:
        # One more score in the softmax, without a value, makes all weights smaller.
        result = result * torch.sigmoid(aux.lse - layer.sinks[None, :, None])[..., None].to(result.dtype)
    return result.transpose(1, 2)


def _clear_unused(context: Context, block_size: int) -> None:
    """Zero the values behind each sequence's last token, in its block: they belong to no token and may be anything.

    A weight of zero would not hide NaN.
    """
    last = context.positions.amax(1, keepdim=True)
    offsets = torch.arange(block_size, device=last.device)
    slots = context.tables.gather(1, last // block_size) * block_size + offsets
    is_unused = (offsets > last % block_size)[:, :, None, None]
    context.values.index_put_((slots,), context.values[slots].masked_fill(is_unused, 0.0))
