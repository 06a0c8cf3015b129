"""What a model's chat template says: how prompts are written, and how its answers are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tidewheel.engine.errors import ModelError
from tidewheel.engine.text.tokenizer import Tokenizer

from .model_formats import ModelFormats, model_formats
from .templates import ChatTemplate


class ModelTemplate(NamedTuple):
    """A chat template and the formats that it tells of."""

    template: ChatTemplate
    formats: ModelFormats


def model_template(
    tokenizer: Tokenizer, chat_template: str | Mapping[str, str] | None, tool_call_parser: str, reasoning_parser: str
) -> ModelTemplate:
    """The template `chat_template`, or the tokenizer's own. Raises ModelError if it does not compile.

    The parsers are those of `model_formats`.
    """
    if tokenizer.chat is not None:
        if chat_template is not None:
            raise ModelError(
                "a chat template cannot be used with --tokenizer-mode mistral, which encodes chats without one: leave "
                "out --chat-template or that mode"
            )
        # Which formats there are is told by their tokens, as a template would by its text.
        signs = " ".join(tag for tag in ("[TOOL_CALLS]", "[THINK]") if tokenizer.token_to_id(tag) is not None)
        return ModelTemplate(
            ChatTemplate(None, {}), model_formats(f"{{{{ tools }}}} {signs}", tool_call_parser, reasoning_parser)
        )
    source = chat_template or tokenizer.chat_template
    return ModelTemplate(
        ChatTemplate(source, tokenizer.special_tokens_map), model_formats(source, tool_call_parser, reasoning_parser)
    )
