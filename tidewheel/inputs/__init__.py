"""Kinds of prompts, where vLLM has them."""

from __future__ import annotations

from tidewheel.offline.prompts import Prompt as PromptType
from tidewheel.offline.prompts import TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
