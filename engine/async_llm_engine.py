"""AsyncLLM by the name and in the place that vLLM has for it. For scripts alone: nothing here imports it."""

from __future__ import annotations

from tidewheel import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
