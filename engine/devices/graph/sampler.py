"""Tokens from logits on the device. The operations and their order are as in `devices/sampling.py`.

Numbers differ from the reference's by rounding, because functions and sums are the device's own. So a draw very close
to a boundary between two tokens may give the other one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..sampling import BLOCK, EXP_UNDERFLOW, MASS_UNITS, NO_TOKEN

Keep = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Weights `[R, vocab] float32` in [0, 1], `top_k` and `top_p [R, 1]`; returns the weights, with 0 for those left out.

Of equal weights the first ones stay.
"""


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row, the first of equals. `logits [R, vocab] float32`, returns `[R] int64`.

    A row without a finite maximum gets NO_TOKEN.
    """
    return logits.argmax(-1).masked_fill(~logits.amax(-1).isfinite(), NO_TOKEN)


def keep_by_sorting(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The weights that top-k and top-p leave. The sort is stable."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), 0.0)
    mass = (ordered.to(top_p.dtype) * MASS_UNITS).round()
    running = mass.cumsum(-1)
    enough = (top_p * running[:, -1:]).ceil()
    ordered = ordered.masked_fill((top_p < 1) & (running - mass >= enough), 0.0)
    return torch.zeros_like(weights).scatter(-1, order, ordered)


def sample(logits: Tensor, parameters: Tensor, keep: Keep = keep_by_sorting) -> Tensor:
    """A token of each row, `[R] int64`. `logits [R, vocab] float32`.

    `parameters [5, R]` are temperature, top_k, top_p, min_p and a uniform number in [0, 1), in the dtype that sums are
    to have. Temperature 0 is greedy.
    """
    temperature, top_k, top_p, min_p, uniform = parameters[:, :, None].unbind()
    best = logits.amax(-1, keepdim=True)
    divisor = temperature.masked_fill(temperature == 0, 1).float()
    # Divided after the subtraction, so that a tiny temperature leaves 0 for the best and -inf for others.
    scaled = (logits - best) / divisor
    weights = scaled.exp().masked_fill(scaled < float(EXP_UNDERFLOW), 0.0)
    weights = weights.masked_fill(weights < min_p.float(), 0.0)
    tokens = _draw(keep(weights, top_k, top_p), uniform)
    return torch.where(temperature[:, 0] == 0, greedy(logits), tokens).masked_fill(~best[:, 0].isfinite(), NO_TOKEN)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token of each row whose running total exceeds `uniform [R, 1]` of the whole, `[R] int64`."""
    padded = functional.pad(weights, (0, -weights.shape[-1] % BLOCK)).to(uniform.dtype)
    blocks = padded.view(len(weights), -1, BLOCK)
    cumulative = blocks.sum(-1).cumsum(-1)
    target = uniform * cumulative[:, -1:]
    # Rounding may leave nothing beyond the target: then it is the last block, and the last token of it, with a weight.
    block = _first_beyond(cumulative, target)
    before = functional.pad(cumulative, (1, 0)).gather(-1, block)
    chunk = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    return (block * BLOCK + _first_beyond(before + chunk.cumsum(-1), target))[:, 0]


def _first_beyond(running: Tensor, target: Tensor) -> Tensor:
    """Where `running [R, N]`, which never falls, is first above `target [R, 1]`; at most where it reaches its end."""
    beyond = (running <= target).sum(-1, keepdim=True)
    return torch.minimum(beyond, (running < running[:, -1:]).sum(-1, keepdim=True))
