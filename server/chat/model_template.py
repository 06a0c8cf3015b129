"""What a model's chat template says: how prompts are written, and how its answers are read."""

from __future__ import annotations

from typing import NamedTuple

from tidewheel.engine.text.tokenizer import Tokenizer

from .model_formats import ModelFormats, model_formats
from .templates import ChatTemplate


class ModelTemplate(NamedTuple):
    """A chat template and the formats that it tells of."""

    template: ChatTemplate
    formats: ModelFormats


def model_template(
    tokenizer: Tokenizer, chat_template: str | None, tool_call_parser: str, reasoning_parser: str
) -> ModelTemplate:
    """The template `chat_template`, or the tokenizer's own. Raises ModelError if it does not compile.

    The parsers are those of `model_formats`.
    """
    source = chat_template or tokenizer.chat_template
    return ModelTemplate(
        ChatTemplate(source, tokenizer.special_tokens_map), model_formats(source, tool_call_parser, reasoning_parser)
    )
