"""What an answer is made of, where vLLM had it first."""

from __future__ import annotations

from .offline.outputs import Logprob, RequestMetrics

__all__ = ["Logprob", "RequestMetrics"]
