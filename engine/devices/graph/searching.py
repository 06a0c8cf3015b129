"""Top-k and top-p without a sort, for devices whose compilers have none for a whole vocabulary.

The smallest weight that stays is found bit by bit: its power of two, and then its fraction. Each bit is a comparison
with all weights of a row, and a sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..sampling import BLOCK, MASS_UNITS

_HALVINGS = (64, 32, 16, 8, 4, 2, 1)  # 127 of them: float32 has no smaller power of two, but for subnormals
_FRACTION_BITS = 23


def keep_by_search(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The same as `keep_by_sorting`, whose sums may be rounded in another way."""
    most = torch.where(top_k > 0, top_k, weights.shape[-1]).to(weights.dtype)
    least = _largest(lambda bound: _count(weights >= bound) >= most, most)
    room = most - _count(weights > least)
    weights = weights.masked_fill((weights < least) | ((weights == least) & (_rank(weights == least) >= room)), 0.0)

    mass = (weights.to(top_p.dtype) * MASS_UNITS).round()
    enough = (top_p * mass.sum(-1, keepdim=True)).ceil()
    least = _largest(lambda bound: mass.masked_fill(weights < bound, 0.0).sum(-1, keepdim=True) >= enough, most)
    # Of equals, the first ones stay until there is enough.
    before = mass.masked_fill(weights <= least, 0.0).sum(-1, keepdim=True) + _rank(weights == least).to(mass) * mass
    dropped = (weights < least) | ((weights == least) & (before >= enough))
    return weights.masked_fill((top_p < 1) & dropped, 0.0)


def _largest(is_low: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The largest float32 in [0, 1] of each row for which `is_low` holds, `[R, 1]`. It holds for all smaller ones."""
    one = torch.ones_like(like)
    too_high = one  # as a power of two
    for halvings in _HALVINGS:
        lower = too_high * 2.0**-halvings
        too_high = torch.where(is_low(lower), too_high, lower)
    power = too_high * 0.5
    found = power
    for bit in range(1, _FRACTION_BITS + 1):
        higher = found + power * 2.0**-bit
        found = torch.where(is_low(higher), higher, found)
    return torch.where(is_low(one), one, found)


def _count(chosen: Tensor) -> Tensor:
    """How many of each row are chosen, `[R, 1] float32`, which is exact for any vocabulary."""
    return chosen.float().sum(-1, keepdim=True)


def _rank(chosen: Tensor) -> Tensor:
    """How many chosen ones are before each place of a row, `[R, vocab] float32`."""
    padded = functional.pad(chosen.float(), (0, -chosen.shape[-1] % BLOCK))
    blocks = padded.view(len(padded), -1, BLOCK)
    counts = blocks.sum(-1)
    before = (counts.cumsum(-1) - counts)[:, :, None] + blocks.cumsum(-1) - blocks
    return before.flatten(1)[:, : chosen.shape[-1]]
