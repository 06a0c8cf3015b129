"""SparseEncoder: a model that gives a text weights of words, most of them of no weight (SPLADE, arXiv 2109.10086)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .description import EncoderDescription
from .embedder import Embedder
from .encoder import ScorePlan
from .graph import SPARSE
from .pooling import Floats
from .sparse_vectors import products
from .tasks import Task
from .tokenization import EncoderInput


class SparseEncoder(Embedder):
    """An embedder whose vectors are sparse."""

    def plan_scores(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        truncate_to: int | None = None,
        use_activation: bool | None = None,
    ) -> ScorePlan:
        """See Encoder. A score is the product of two vectors. Each text follows its prompt, if the model has one."""
        return self._plan("sparse", queries, documents, truncate_to, products)

    def _choose_outputs(self, description: EncoderDescription) -> Mapping[Task, str]:
        return {"sparse": SPARSE}

    def _results(self, task: Task, values: Sequence[Floats], inputs: Sequence[EncoderInput]) -> list[Floats]:
        return [*map(np.asarray, values)]
