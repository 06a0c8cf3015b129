"""The parser for scripts, where vLLM has it since 0.11.1."""

from __future__ import annotations

from tidewheel.offline.argument_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
