"""A token's log-probability, where vLLM has it since 0.10.2."""

from __future__ import annotations

from .offline.outputs import Logprob

__all__ = ["Logprob"]
