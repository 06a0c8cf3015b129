"""MaxSim: how well a document answers a query, by a vector for each token of both (ColBERT, arXiv 2004.12832)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .pooling import Floats

_QUERY_TOKENS_AT_ONCE = 64  # what is held of a long query and a long document: 64 numbers for each of its tokens


def max_sim(query: Floats, document: Floats) -> float:
    """The sum of each query token's largest product with a token of the document. Shapes [Q, width], [D, width].

    A document of which all tokens are skipped has 0.
    """
    if not len(document):
        return 0.0
    total = 0.0
    for start in range(0, len(query), _QUERY_TOKENS_AT_ONCE):
        # A matmul would wake the threads of numpy's BLAS.
        products = np.einsum("qw,dw->qd", query[start : start + _QUERY_TOKENS_AT_ONCE], document)
        total += float(products.max(axis=1).sum(dtype=np.float64))
    return total


def late_interaction_scores(queries: Sequence[Floats], documents: Sequence[Floats]) -> NDArray[np.float64]:
    """MaxSim of each document with the query at its place, or with the only one. Vectors must have length 1."""
    paired = [*queries] * len(documents) if len(queries) == 1 else queries
    return np.array([max_sim(query, document) for query, document in zip(paired, documents, strict=True)])
