"""What `LLM` and `AsyncLLM` answer, where vLLM has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from .offline.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

__all__ = [
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        from .names_of_vllm import refuse_name

        refuse_name(__name__, name)
