"""A model's chat template: how prompts are written, and how answers are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tidewheel.engine.errors import ModelError
from tidewheel.engine.text.tokenizer import Tokenizer

from .harmony import CHANNEL, END, MESSAGE, START
from .model_formats import ModelFormats, model_formats
from .parser_names import HARMONY_REASONING
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
        # Without a template, the tokens tell the formats.
        signs = " ".join(tag for tag in ("[TOOL_CALLS]", "[THINK]") if tokenizer.token_to_id(tag) is not None)
        return ModelTemplate(
            ChatTemplate(None, {}), model_formats(f"{{{{ tools }}}} {signs}", tool_call_parser, reasoning_parser)
        )
    source = chat_template or tokenizer.chat_template
    formats = model_formats(source, tool_call_parser, reasoning_parser)
    _check_harmony(formats, tokenizer)
    return ModelTemplate(ChatTemplate(source, tokenizer.special_tokens_map), formats)


def _check_harmony(formats: ModelFormats, tokenizer: Tokenizer) -> None:
    is_harmony = formats.reasoning in HARMONY_REASONING
    if formats.tool_calls == "openai" and formats.reasoning is not None and not is_harmony:
        raise ModelError(
            f"--tool-call-parser openai reads answers in which reasoning is not written as {formats.reasoning} does: "
            "add --reasoning-parser openai_gptoss or none"
        )
    missing = [tag for tag in (START, CHANNEL, MESSAGE, END) if tokenizer.token_to_id(tag) is None]
    if is_harmony and missing:
        raise ModelError(
            f"the tokenizer has no {missing[0]}, with which models write the harmony format that the chat template or "
            "--reasoning-parser asks for: give --chat-template that of the model, or add --reasoning-parser none"
        )
