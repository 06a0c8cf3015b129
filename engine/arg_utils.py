"""The arguments of an engine, where vLLM has them. For scripts alone: nothing here imports it."""

from __future__ import annotations

from tidewheel import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
