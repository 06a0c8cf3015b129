"""Sparse vectors: token ids in ascending order and their weights, `[k, 2]`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .pooling import Floats


def strongest(token_ids: Sequence[int], weights: Floats, left_out: Sequence[int]) -> Floats:
    """The largest weight of each token id, of those above 0. `weights [T]` are of the tokens, `left_out` ids of none.

    Weights that are not finite are kept, for the caller to find.
    """
    ids = np.asarray(token_ids, np.int64)
    counts = ~(weights <= 0) & ~np.isin(ids, left_out)
    found, places = np.unique(ids[counts], return_inverse=True)
    largest = np.zeros(len(found), np.float32)
    np.maximum.at(largest, places, weights[counts])
    return np.stack([found.astype(np.float32), largest], axis=1)


def products(first: Sequence[Floats], second: Sequence[Floats]) -> NDArray[np.float64]:
    """The product of each pair of sparse vectors, or of the only first one with each second one."""
    firsts = [*first] * len(second) if len(first) == 1 else first
    return np.array([_product(*pair) for pair in zip(firsts, second, strict=True)], np.float64)


def _product(first: Floats, second: Floats) -> float:
    _, ours, theirs = np.intersect1d(first[:, 0], second[:, 0], assume_unique=True, return_indices=True)
    return float(np.einsum("k,k->", first[ours, 1].astype(np.float64), second[theirs, 1].astype(np.float64)))
