"""MaxSim is what its formula says, for queries of any length."""

from __future__ import annotations

import numpy as np
import pytest

from tidewheel.engine.encoders.late_interaction import late_interaction_scores


@pytest.mark.parametrize("tokens", [1, 32, 150])
def test_each_query_token_counts_its_best_document_token(tokens: int) -> None:
    random = np.random.default_rng(0)
    query = random.standard_normal((tokens, 8)).astype(np.float32)
    documents = [random.standard_normal((count, 8)).astype(np.float32) for count in (1, 5, 90)]
    wanted = [(query.astype(np.float64) @ document.T).max(axis=1).sum() for document in documents]
    np.testing.assert_allclose(late_interaction_scores([query], documents), wanted, rtol=1e-5)
    pairs = late_interaction_scores([query, documents[2], documents[1]], documents)
    assert pairs[0] == late_interaction_scores([query], documents[:1])[0]
    assert pairs[1] != wanted[1]


def test_a_document_without_tokens_answers_nothing() -> None:
    query, document = np.ones((3, 8), np.float32), np.ones((2, 8), np.float32)
    assert late_interaction_scores([query], [document[:0], document]).tolist() == [0, 24]
