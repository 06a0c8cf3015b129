"""`LLMEngine`, where vLLM's second version has it."""

from __future__ import annotations

from tidewheel.offline.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
