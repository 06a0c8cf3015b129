"""Linear recurrences over a launch's tokens, some tokens at a time.

A head has a state S `[K, V]`. A token makes it `decay * S + k u^T` and reads `S^T q`. In Mamba2, u is given; in a delta
net it is `beta * (v - (decay * S)^T k)`. Within a chunk the states are never made: what a token reads of the chunk's
earlier ones is a masked product, as in https://arxiv.org/abs/2405.21060, and all u of a delta net's chunk solve one
triangular system, as in https://arxiv.org/abs/2412.06464. Only chunks follow one another.

Dimensions: S sequences, Q tokens, G groups of heads with the same q and k, R heads of a group, C tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_CHUNK = 64
_LEAST_LOG_DECAY = -50.0  # leaves nothing in float32, and keeps the sums of a chunk's small


def recur(
    queries: Tensor, keys: Tensor, values: Tensor, log_decays: Tensor, state: Tensor, betas: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the tokens read, `[S, Q, G, R, V]`, and the state behind them. With `betas`, it is a delta net's.

    `queries` and `keys [S, Q, G, K]`, `values [S, Q, G, R, V]`, `log_decays` and `betas [S, Q, G, R]`, `state [S, G, R,
    K, V]`, all float32. A token whose values, or betas, and log_decays are 0 changes nothing.
    """
    Q = values.shape[1]
    C = min(Q, _CHUNK)
    q, k, v, decays = (_chunks(x, C) for x in (queries, keys, values, log_decays.clamp(min=_LEAST_LOG_DECAY)))
    sums = decays.cumsum(2)  # of the chunk up to a token: [S, N, C, G, R]
    by_head = sums.movedim(2, -1)
    row, column = torch.arange(C, device=v.device)[:, None], torch.arange(C, device=v.device)
    # [S, N, G, R, C, C]: what is left of one token at another; exp of what lies above the diagonal may be infinite.
    left = (by_head[..., :, None] - by_head[..., None, :]).masked_fill(row < column, -torch.inf).exp()
    seen = torch.einsum("sncgk,snigk->sngci", q, k)[:, :, :, None] * left
    since_begin = sums.exp()[..., None]
    until_end = (sums[:, :, -1:] - sums).exp()[..., None]
    inverse = beta = None
    if betas is not None:
        beta = _chunks(betas, C)
        alike = torch.einsum("sncgk,snigk->sngci", k, k)[:, :, :, None] * left * beta.movedim(2, -1)[..., None]
        inverse = _inverse(alike.masked_fill(row <= column, 0.0))
    results = []
    for n in range(v.shape[1]):
        u = v[:, n]
        if beta is not None and inverse is not None:
            known = torch.einsum("scgk,sgrkv->scgrv", k[:, n], state) * since_begin[:, n]
            u = torch.einsum("sgrci,sigrv->scgrv", inverse[:, n], beta[:, n, ..., None] * (u - known))
        before = torch.einsum("scgk,sgrkv->scgrv", q[:, n], state) * since_begin[:, n]
        results.append(before + torch.einsum("sgrci,sigrv->scgrv", seen[:, n], u))
        added = torch.einsum("scgk,scgrv->sgrkv", k[:, n], u * until_end[:, n])
        state = state * since_begin[:, n, -1, ..., None] + added
    return torch.cat(results, 1)[:, :Q], state


def _chunks(x: Tensor, size: int) -> Tensor:
    """`[S, N, size, ...]` of `x [S, Q, ...]`, with zeros behind its end."""
    missing = -x.shape[1] % size
    if missing:
        x = functional.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return torch.unflatten(x, 1, (-1, size))


def _inverse(lower: Tensor) -> Tensor:
    """The inverse of `I + lower [..., C, C]`, which is 0 on the diagonal and above it.

    Blocks on the diagonal are inverted, two of them make one of twice the size, and so on. So no number becomes larger
    than those of the result are.
    """
    C = lower.shape[-1]
    place = torch.arange(C, device=lower.device)
    inverse = torch.eye(C, device=lower.device).expand_as(lower)
    size = 1
    while size < C:
        row, column = place[:, None] // size, place // size
        beside = (row == column + 1) & (column % 2 == 0)
        inverse = inverse - inverse @ lower.masked_fill(~beside, 0.0) @ inverse
        size *= 2
    return inverse
