"""`AsyncLLM`, where vLLM has it."""

from __future__ import annotations

from tidewheel.offline.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
