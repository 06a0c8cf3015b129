"""LLMEngine, where vLLM has it. For scripts alone: nothing here imports it."""

from __future__ import annotations

from tidewheel import LLMEngine

__all__ = ["LLMEngine"]
