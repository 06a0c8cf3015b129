"""Attention on GPUs: decodes by a kernel of Triton, and what else there is in torch's ways."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .attention import AttentionLayer, Context, gather_attention
from .flex_attention import paged_flex_attention, plan_flex_attention
from .kernels.finding import kernels_of

_TILE = 32  # of the kernel, which a block of the cache must be a multiple of


def gpu_attention(q: Tensor, context: Context, layer: AttentionLayer) -> Tensor:
    """See Attend. Prompts are FlexAttention's."""
    attended = decode_attention(q, context, layer)
    return paged_flex_attention(q, context, layer) if attended is None else attended


def latent_attention(q: Tensor, context: Context, layer: AttentionLayer) -> Tensor:
    """The same where values are the first numbers of keys, on any device. Prompts gather what they attend to."""
    attended = decode_attention(q, context, layer, values_in_keys=True)
    return gather_attention(q, context, layer) if attended is None else attended


def plan_gpu_attention(
    positions: Tensor, tables: Tensor, block_size: int, num_blocks: int, window: int | None
) -> Sequence[Tensor]:
    """See PlanAttention. The kernel needs no plan."""
    if _kernels(positions, block_size) is not None:
        return ()
    return plan_flex_attention(positions, tables, block_size, num_blocks, window)


def decode_attention(
    q: Tensor, context: Context, layer: AttentionLayer, *, values_in_keys: bool = False
) -> Tensor | None:
    """Attention of one token of each sequence, `q [S, 1, H, D]`; None for more, and where no kernel does it."""
    spec, kernels = layer.spec, _kernels(context.positions, layer.block_size)
    if kernels is None:
        return None
    partial, sums = kernels.attend(
        q[:, 0],
        context.keys,
        context.values,
        context.tables,
        context.positions[:, 0],
        layer.slopes,
        spec.scale,
        spec.softcap or 0.0,
        spec.sliding_window or 0,
        layer.block_size,
        values_in_keys,
    )
    largest = sums.amax(-1, keepdim=True)
    if layer.sinks is not None:
        largest = torch.maximum(largest, layer.sinks[:, None])
    weights = torch.exp(sums - largest)
    total = weights.sum(-1, keepdim=True)
    if layer.sinks is not None:
        total = total + torch.exp(layer.sinks[:, None] - largest)
    result: Tensor = (partial * (weights / total)[..., None]).sum(2)
    return result[:, None]


def _kernels(positions: Tensor, block_size: int) -> ModuleType | None:
    """What attends for tokens at `positions [S, Q]`; None: prompts, or a device or a cache that it is not for."""
    is_decode = positions.shape[1] == 1 and block_size % _TILE == 0
    return kernels_of("decode_attention", positions.device) if is_decode else None
