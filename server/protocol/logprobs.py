"""`prompt_logprobs`, in vLLM's shape."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class PromptTokenLogprob(msgspec.Struct):
    """A token that might stand at a place of the prompt; the likeliest has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsList: TypeAlias = list[dict[int, PromptTokenLogprob] | None]
"""For each token of the prompt itself and the most likely ones at its place, by token id; None for the first token."""
