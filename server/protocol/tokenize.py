"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

from typing import Any

import msgspec

from .chat import Message, Tool
from .decode import Body


class TokenizeRequest(Body, kw_only=True):
    """Either a `prompt`, or `messages` to go through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct):
    """Token ids, their number, and the model's context in tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body, kw_only=True):
    """Token ids to turn back into text."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct):
    """The text."""

    prompt: str


class TokenizerInfo(msgspec.Struct, omit_defaults=True):
    """What a tokenizer's files say of it. `special_tokens` are the ids of those that mark structure.

    The three tokens stand here once more, where lm_eval looks for them.
    """

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    special_tokens: dict[str, int]
    special_tokens_map: dict[str, str | list[str]]
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    chat_template: str | dict[str, str] | None = None
