"""Kinds of prompts, where vLLM has them, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from . import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        from tidewheel.names_of_vllm import refuse_name

        refuse_name(__name__, name)
