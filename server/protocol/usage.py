"""Token counts of an answer."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """How many of the prompt's tokens were found in the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """How many of the completion's tokens were reasoning."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of all prompts and all choices of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
