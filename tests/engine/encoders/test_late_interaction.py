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
