"""What `LLM` and `AsyncLLM` answer, where vLLM has it."""

from __future__ import annotations

from .offline.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput

__all__ = ["CompletionOutput", "EmbeddingRequestOutput", "RequestOutput", "ScoringRequestOutput"]
