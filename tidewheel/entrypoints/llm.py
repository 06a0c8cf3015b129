"""`LLM`, where vLLM has it."""

from __future__ import annotations

from tidewheel.offline.llm import LLM

__all__ = ["LLM"]
