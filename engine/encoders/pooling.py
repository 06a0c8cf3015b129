"""Pooling: one vector for each text from one for each token, as sentence-transformers' Pooling module does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def pool(tokens: Floats, lengths: NDArray[np.int64], prompt_lengths: NDArray[np.int64], modes: Sequence[str]) -> Floats:
    """The pooled vectors of a batch. The vectors of several modes are concatenated.

    `tokens` are the token embeddings [B, T, hidden]. Row b has `lengths[b]` real ones; the first `prompt_lengths[b]` of
    these are left out. Shape [B, len(modes) * hidden].
    """
    positions = np.arange(tokens.shape[1])
    starts = np.minimum(prompt_lengths, lengths - 1)  # a text that is only a prompt keeps its last token
    mask = (positions >= starts[:, None]) & (positions < lengths[:, None])
    return np.concatenate([POOLING_MODES[mode](tokens, mask) for mode in modes], axis=1)


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


def _first(tokens: Floats, mask: NDArray[np.bool_]) -> Floats:
    vectors: Floats = tokens[np.arange(len(tokens)), mask.argmax(axis=1)]
    return vectors


def _last(tokens: Floats, mask: NDArray[np.bool_]) -> Floats:
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    vectors: Floats = tokens[np.arange(len(tokens)), last]
    return vectors


def _largest(tokens: Floats, mask: NDArray[np.bool_]) -> Floats:
    vectors: Floats = np.where(mask[:, :, None], tokens, -np.inf).max(axis=1).astype(np.float32)
    return vectors


def _weighted(tokens: Floats, weights: Floats) -> Floats:
    vectors: Floats = np.einsum("bt,bth->bh", weights, tokens)  # a matmul would wake the threads of numpy's BLAS
    return vectors


def _mean(tokens: Floats, mask: NDArray[np.bool_]) -> Floats:
    return _weighted(tokens, mask / mask.sum(axis=1, keepdims=True, dtype=np.float32))


def _mean_sqrt_len(tokens: Floats, mask: NDArray[np.bool_]) -> Floats:
    return _weighted(tokens, mask / np.sqrt(mask.sum(axis=1, keepdims=True, dtype=np.float32)))


def _position_weighted_mean(tokens: Floats, mask: NDArray[np.bool_]) -> Floats:
    """Weights tokens by their position in the text, from 1: later ones count more (SGPT, arXiv 2202.08904)."""
    weights = mask * np.arange(1, mask.shape[1] + 1, dtype=np.float32)
    return _weighted(tokens, weights / weights.sum(axis=1, keepdims=True))


POOLING_MODES: dict[str, Callable[[Floats, NDArray[np.bool_]], Floats]] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _position_weighted_mean,
    "lasttoken": _last,
}
"""The modes, by sentence-transformers' names, in the order in which it concatenates them."""
