"""The fused kernels of habana_frameworks, where the installed release has them.

https://docs.habana.ai/en/latest/PyTorch/Python_Packages.html (hpex). Each takes the place of several operations, which
do the same if it is missing.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .attention import Attend, AttentionLayer, Context, gather, gather_attention
from .operations import Operations, RmsNorm, Rotate

logger = logging.getLogger(__name__)


def find_kernels() -> tuple[Attend, Operations]:
    """How to attend, normalize and rotate. The log names each kernel that is missing."""
    sdpa = _kernel("kernels", "FusedSDPA", "attention")
    rms_norm = _kernel("normalization", "FusedRMSNorm", "RMSNorm")
    apply = _kernel("kernels", "apply_rotary_pos_emb", "RoPE")
    modes = _kernel("kernels", "RotaryPosEmbeddingMode", "RoPE")
    return (
        gather_attention if sdpa is None else _attend(sdpa),
        Operations(
            rms_norm=None if rms_norm is None else _rms_norm(rms_norm),
            rotate=None if apply is None or modes is None else _rotate(apply, modes),
        ),
    )


def _kernel(module: str, name: str, used_for: str) -> Any:
    """A kernel of the package; None if this release lacks it."""
    path = f"habana_frameworks.torch.hpex.{module}"
    try:
        return getattr(import_module(path), name)
    except (ImportError, AttributeError) as error:
        logger.warning("%s has no %s (%s): torch's own operations compute %s, more slowly", path, name, error, used_for)
        return None


def _attend(kernel: Any) -> Attend:
    def attend(q: Tensor, context: Context, layer: AttentionLayer) -> Tensor:
        """In bfloat16 without more than scores and a softmax. What else there is, `gather_attention` does."""
        num_queries = q.shape[1]
        is_plain = layer.spec.softcap is None and layer.slopes is None and layer.sinks is None
        if q.dtype != torch.bfloat16 or not is_plain:
            return gather_attention(q, context, layer)
        k, v, _, visible = gather(context, layer, num_queries)
        # Scores of unused slots must be numbers too: the mask is added to them.
        k = k.masked_fill(~visible.any(1)[:, :, None, None], 0.0)
        mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)[:, None]
        # No dropout, not causal beyond the mask, and an exact softmax. With recomputation the scores of prompts take
        # little memory. For one query optimum-habana's models do without (https://github.com/huggingface/optimum-habana).
        attended: Tensor = kernel.apply(
            *(x.transpose(1, 2) for x in (q, k, v)), mask, 0.0, False, layer.spec.scale, "None", num_queries > 1
        )
        return attended.transpose(1, 2)

    return attend


def _rms_norm(kernel: Any) -> RmsNorm:
    def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normalized: Tensor = kernel.apply(x.reshape(1, -1, x.shape[-1]), weight, eps)  # it wants three dimensions
        return normalized.view(x.shape)

    return normalize


def _rotate(apply: Any, modes: Any) -> Rotate:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        S, Q, heads, size = x.shape
        # It wants the angle of each dimension, where two dimensions are a pair.
        angles = (torch.stack((t, t), -1).flatten(-2) if interleaved else torch.cat((t, t), -1) for t in (cos, sin))
        mode = modes.PAIRWISE if interleaved else modes.BLOCKWISE
        rows = x.reshape(S * Q, heads, size)
        turned: Tensor = apply(rows, *(angle.view(S * Q, 1, size) for angle in angles), None, 0, mode)
        return turned.view(x.shape)

    return rotate
