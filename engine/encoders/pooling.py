"""Pooling: one vector for each text from one for each token, as sentence-transformers' Pooling module does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def pool(tokens: Floats, prompt_length: int, modes: Sequence[str]) -> Floats:
    """The pooled vector of a text. The vectors of several modes are concatenated, `[len(modes) * hidden]`.

    `tokens` are its token embeddings `[T, hidden]`, of which the first `prompt_length` are left out.
    """
    first = min(prompt_length, len(tokens) - 1)  # a text that is only a prompt keeps its last token
    return np.concatenate([POOLING_MODES[mode](tokens[first:], first) for mode in modes])


def looks_at_ends(modes: Sequence[str]) -> bool:
    """Whether `pool` looks at nothing but the first token that counts and the last one."""
    return set(modes) <= {"cls", "lasttoken"}


def places_read(length: int, prompt_length: int, modes: Sequence[str]) -> list[int]:
    """Which of so many tokens `pool` looks at where it looks at ends, in ascending order."""
    first, last = min(prompt_length, length - 1), length - 1
    return sorted({first if mode == "cls" else last for mode in modes})


def normalized(vectors: Floats) -> Floats:
    """The vectors scaled to length 1. Zero vectors do not change. Shape [N, size]."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Floats = vectors / np.maximum(lengths, 1e-12)
    return scaled


def cosines(first: Floats, second: Floats) -> NDArray[np.float64]:
    """The cosine of each pair of rows, 0 if one row is zero. Shapes [N, size], or [1, size] for all pairs."""
    products = (normalized(first) * normalized(second)).sum(axis=1, dtype=np.float64)
    cosine: NDArray[np.float64] = np.clip(products, -1.0, 1.0)
    return cosine


def _weighted(tokens: Floats, weights: Floats) -> Floats:
    vector: Floats = np.einsum("t,th->h", weights, tokens)  # a matmul would wake the threads of numpy's BLAS
    return vector


def _mean(tokens: Floats, divisor: float) -> Floats:
    vector: Floats = np.add.reduce(tokens, axis=0) / np.float32(divisor)  # row by row, in their order
    return vector


def _position_weighted_mean(tokens: Floats, first: int) -> Floats:
    """Weights tokens by their position in the text, from 1: later ones count more (SGPT, arXiv 2202.08904)."""
    weights = np.arange(first + 1, first + 1 + len(tokens), dtype=np.float32)
    return _weighted(tokens, weights / weights.sum())


POOLING_MODES: dict[str, Callable[[Floats, int], Floats]] = {
    "cls": lambda tokens, first: tokens[0],
    "max": lambda tokens, first: tokens.max(axis=0),
    "mean": lambda tokens, first: _mean(tokens, len(tokens)),
    "mean_sqrt_len_tokens": lambda tokens, first: _mean(tokens, len(tokens) ** 0.5),
    "weightedmean": _position_weighted_mean,
    "lasttoken": lambda tokens, first: tokens[-1],
}
"""The modes, by sentence-transformers' names, in the order in which it concatenates them: functions of the tokens that
count, and of how many come before them."""
