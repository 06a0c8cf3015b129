"""Kinds of prompts, where vLLM has them."""

from __future__ import annotations

from .offline.prompts import Prompt as PromptType
from .offline.prompts import TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
