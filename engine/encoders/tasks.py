"""Task: what an encoder is asked for. The names are vLLM's, and `sparse`."""

from __future__ import annotations

from typing import Literal

Task = Literal["embed", "token_embed", "classify", "token_classify", "sparse"]
"""What the result of one input is, float32:

- `embed`: the pooled vector, before it is normalized, `[width]`
- `token_embed`: a vector for each token, `[tokens, width]`
- `classify`: the logits of the labels, `[labels]`
- `token_classify`: the same for each token, `[tokens, labels]`
- `sparse`: weights above 0 of token ids, which ascend, `[k, 2]` with (token id, weight)

A score of a pair of texts is `classify` with one label, the cosine of two `embed`, or MaxSim of two `token_embed`.
"""

OF_TOKENS: frozenset[Task] = frozenset({"token_embed", "token_classify"})
"""The tasks that give a row for each token."""
