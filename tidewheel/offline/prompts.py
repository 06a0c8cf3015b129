"""Prompts to token ids: texts, token ids, and conversations, which the chat template renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, TypedDict, cast

import msgspec

from tidewheel.engine.constraints.constraint import Preface
from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.text.tokenizer import ChatTemplate as TemplateSource
from tidewheel.server.chat.answer_parsers import AnswerParsers
from tidewheel.server.chat.model_template import model_template
from tidewheel.server.chat.rendering import PromptRenderer, RenderedPrompt
from tidewheel.server.chat.request_prompts import RequestPrompts
from tidewheel.server.chat.tools.tool_choice import request_tools
from tidewheel.server.generation.prompt_encoding import PromptEncoder
from tidewheel.server.generation.token_constraints import Frame
from tidewheel.server.protocol.chat import ChatCompletionRequest
from tidewheel.server.protocol.decode import BodyDecoder, ParameterNotes

from .errors import engine_errors

PromptType: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a dict: {"prompt": text} or {"prompt_token_ids": ids}, with a "cache_salt" if wanted."""


class _Salted(TypedDict, total=False):
    cache_salt: str


class TextPrompt(_Salted):
    """A prompt that is a text."""

    prompt: str


class TokensPrompt(_Salted):
    """A prompt that is token ids."""

    prompt_token_ids: Sequence[int]


Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages as OpenAI has them: dicts with a role and content."""

_PROMPT_FIELDS = {"prompt", "prompt_token_ids", "cache_salt"}
_TEMPLATES = 16  # compiled chat templates that are kept


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine takes it. `preface` is the reasoning that may come before a structured answer, and `frame`
    what else is around one.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None
    preface: Preface | None = None
    frame: Frame | None = None


class Prompts:
    """Encodes prompts for one model, with the server's code. Long ones are encoded in threads."""

    def __init__(self, encoder: PromptEncoder, template: TemplateSource | None) -> None:
        self._encoder = encoder
        self._template = template
        self._chat = lru_cache(_TEMPLATES)(self._chat_of)
        self._decode = BodyDecoder(ChatCompletionRequest, notes=ParameterNotes())

    async def encode(self, prompt: PromptType, *, context: int, truncate_to: int | None, room: int) -> EncodedPrompt:
        """A prompt's token ids, for a context of `context` tokens. `truncate_to` and `room` are as in PromptEncoder.

        Raises InvalidRequestError.
        """
        given, salt = prompt, None
        if isinstance(prompt, Mapping):
            given, salt = from_dict(prompt)
        encoder = self._encoder.within(context)
        with engine_errors():
            if isinstance(given, str):
                text = given
                ids = await encoder.run(
                    len(text),
                    lambda: encoder.encode(text, "prompt", add_special_tokens=True, truncate_to=truncate_to, room=room),
                )
                encoder.check_prompt(ids, "prompt", room)
                return EncodedPrompt(text, ids, salt)
            ids = encoder.truncated(_token_ids(given), truncate_to, None, room)
            encoder.check_prompt(ids, "prompt", room)
        return EncodedPrompt(None, ids, salt)

    async def render(
        self, conversation: Conversation, *, context: int, truncate_to: int | None, **fields: Any
    ) -> EncodedPrompt:
        """A conversation's prompt; `fields` are others of a chat completion's body. Raises InvalidRequestError."""
        prompts, parsers = self._chat(fields.pop("chat_template", None))
        with engine_errors():
            body, size = self._body(conversation, truncate_prompt_tokens=truncate_to, **fields)
            rendered, token_ids = await prompts.encode(body, request_tools(body), size, context)
        return EncodedPrompt(rendered.text, token_ids, None, parsers.preface(rendered), parsers.frame(rendered))

    def rendered(self, conversation: Conversation, **fields: Any) -> RenderedPrompt:
        """A conversation's prompt as text, of any length; `fields` are as in `render`. Called from any thread.

        Raises InvalidRequestError.
        """
        prompts, _ = self._chat(fields.pop("chat_template", None))
        with engine_errors():
            body, _ = self._body(conversation, **fields)
            return prompts.rendered(body, request_tools(body))

    @property
    def template(self) -> TemplateSource | None:
        """The chat template where a conversation brings none."""
        return self._template

    @template.setter
    def template(self, template: TemplateSource | None) -> None:
        self._template = template
        self._chat.cache_clear()

    def _body(self, conversation: Conversation, **fields: Any) -> tuple[ChatCompletionRequest, int]:
        """A chat completion's body, and its size in bytes."""
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            raw = msgspec.json.encode({**given, "messages": conversation})
        except TypeError as error:
            raise InvalidRequestError(f"the conversation cannot be written as JSON: {error}", "messages") from None
        body = self._decode(raw)
        body.check_supported()
        return body, len(raw)

    def _chat_of(self, template: str | None) -> tuple[RequestPrompts, AnswerParsers]:
        read = model_template(self._encoder.tokenizer, template or self._template, "auto", "auto")
        renderer = PromptRenderer(read.template, self._encoder, tools_as_text=read.formats.tools_as_text)
        return RequestPrompts(self._encoder, renderer), AnswerParsers(read.formats, self._encoder.tokenizer)


def from_dict(prompt: Mapping[str, Any]) -> tuple[str | Sequence[int], str | None]:
    """A prompt that is a dict as a text or token ids, and its cache salt. Raises InvalidRequestError."""
    if unknown := [name for name in prompt if name not in _PROMPT_FIELDS]:
        raise InvalidRequestError(
            f"a prompt's {unknown[0]} is not supported: it may have {', '.join(sorted(_PROMPT_FIELDS))}", "prompt"
        )
    given = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if given is None:
        raise InvalidRequestError("a prompt that is a dict needs prompt or prompt_token_ids", "prompt")
    return cast("str | Sequence[int]", given), prompt.get("cache_salt")


def _token_ids(given: object) -> list[int]:
    try:
        return msgspec.convert(given, list[int])
    except msgspec.ValidationError:
        raise InvalidRequestError("a prompt must be a text, a list of token ids, or a dict with one of them") from None
