"""Attention on GPUs: decodes by a kernel of Triton, and what else there is in torch's ways.

Kernels are looked for when a model is loaded: torch.compile cannot follow the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .attention import Attend, AttentionLayer, Context, PlanAttention, gather_attention
from .flex_attention import paged_flex_attention, plan_flex_attention
from .kernels.finding import kernels_of

_TILE = 32  # of the kernel, which a block of the cache must be a multiple of


def gpu_attention(device: torch.device, block_size: int) -> Attend:
    """How a device attends. Prompts are FlexAttention's."""
    kernels = _kernels(device, block_size)
    return paged_flex_attention if kernels is None else _with_kernels(kernels, paged_flex_attention)


def plan_gpu_attention(device: torch.device, block_size: int) -> PlanAttention:
    """What that needs. The kernel needs no plan."""

    def plan(
        positions: Tensor, tables: Tensor, block_size: int, num_blocks: int, window: int | None
    ) -> Sequence[Tensor]:
        if positions.shape[1] == 1:
            return ()
        return plan_flex_attention(positions, tables, block_size, num_blocks, window)

    return plan_flex_attention if _kernels(device, block_size) is None else plan


def latent_attention(device: torch.device, block_size: int) -> Attend:
    """How any device attends where values are the first numbers of keys. Prompts gather what they attend to."""
    kernels = _kernels(device, block_size)
    return gather_attention if kernels is None else _with_kernels(kernels, gather_attention, values_in_keys=True)


def _kernels(device: torch.device, block_size: int) -> ModuleType | None:
    return None if block_size % _TILE else kernels_of("decode_attention", device)


def _with_kernels(kernels: ModuleType, attend_to_prompts: Attend, *, values_in_keys: bool = False) -> Attend:
    def attend(q: Tensor, context: Context, layer: AttentionLayer) -> Tensor:
        if q.shape[1] != 1:
            return attend_to_prompts(q, context, layer)
        spec = layer.spec
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

    return attend
