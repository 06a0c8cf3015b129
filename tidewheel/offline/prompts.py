"""Prompts to token ids: texts, token ids, and conversations, which the chat template renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, TypedDict, cast

import msgspec

from tidewheel.engine.constraints.constraint import Preface
from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.media.media import Media, MediaFiles, MediaSpan
from tidewheel.engine.text.tokenizer import ChatTemplate as TemplateSource
from tidewheel.server.chat.answer_parsers import AnswerParsers
from tidewheel.server.chat.image_placeholders import ImagePlaceholders, ReadImage
from tidewheel.server.chat.model_template import model_template
from tidewheel.server.chat.rendering import PromptRenderer, RenderedPrompt
from tidewheel.server.chat.request_images import IMAGE_PARTS, VIDEO_PARTS, RequestImages
from tidewheel.server.chat.request_prompts import RequestPrompts
from tidewheel.server.chat.tools.tool_choice import request_tools
from tidewheel.server.generation.prompt_encoding import PromptEncoder
from tidewheel.server.generation.token_constraints import Frame
from tidewheel.server.protocol.chat import ChatCompletionRequest, ContentPart
from tidewheel.server.protocol.decode import BodyDecoder, ParameterNotes

from .errors import engine_errors
from .images import media_files, with_sent_images
from .vllm_calls import say_once

PromptType: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a dict: {"prompt": text} or {"prompt_token_ids": ids}, with a "cache_salt" if wanted.

A text may have images and videos: {"prompt": text, "multi_modal_data": {"image": image, "video": frames}}, with the
model's placeholder in the text for each. "mm_processor_kwargs" are settings of the model's image processor for them.
"""


class _Salted(TypedDict, total=False):
    cache_salt: str


class TextPrompt(_Salted, total=False):
    """A prompt that is a text, with the images and videos that it has placeholders for."""

    prompt: str
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]


class TokensPrompt(_Salted):
    """A prompt that is token ids."""

    prompt_token_ids: Sequence[int]


Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages as OpenAI has them: dicts with a role and content."""

_PROMPT_FIELDS = {"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data", "mm_processor_kwargs"}
_IDLE_FIELDS = {"multi_modal_uuids": "images are recognized by their content"}
_NOTHING = Media((), None, 0, b"", 0, 0)
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
    media: tuple[MediaSpan, ...] = ()


class Prompts:
    """Encodes prompts for one model, with the server's code. Long ones are encoded in threads.

    `images` reads the images of prompts; `images_in_place` is as in PromptRenderer.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        template: TemplateSource | None,
        images: RequestImages,
        *,
        images_in_place: bool = False,
    ) -> None:
        self._encoder = encoder
        self._template = template
        self._images = images
        self._images_in_place = images_in_place
        reader = images.reader
        self._placeholders = None if reader is None else ImagePlaceholders(reader, encoder.tokenizer)
        self._chat = lru_cache(_TEMPLATES)(self._chat_of)
        self._decode = BodyDecoder(ChatCompletionRequest, notes=ParameterNotes())

    async def encode(self, prompt: PromptType, *, context: int, truncate_to: int | None, room: int) -> EncodedPrompt:
        """A prompt's token ids, for a context of `context` tokens. `truncate_to` and `room` are as in PromptEncoder.

        Raises InvalidRequestError.
        """
        given, salt = prompt, None
        files: Sequence[MediaFiles] = ()
        settings: Mapping[str, Any] = {}
        if isinstance(prompt, Mapping):
            given, salt = from_dict(prompt)
            files = media_files(prompt.get("multi_modal_data") or {}, "multi_modal_data")
            settings = prompt.get("mm_processor_kwargs") or {}
        encoder = self._encoder.within(context)
        with engine_errors():
            if files:
                return await self._with_images(encoder, given, files, settings, salt, truncate_to, room)
            if settings:
                raise InvalidRequestError("mm_processor_kwargs: this prompt has no multi_modal_data", "prompt")
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

    async def _with_images(
        self,
        encoder: PromptEncoder,
        given: PromptType,
        files: Sequence[MediaFiles],
        settings: Mapping[str, Any],
        salt: str | None,
        truncate_to: int | None,
        room: int,
    ) -> EncodedPrompt:
        """A text that has placeholders for images. Raises ApiError and InvalidRequestError."""
        media = await self._images.read_files(files, "multi_modal_data", settings)
        placeholders = self._placeholders
        assert placeholders is not None
        if not isinstance(given, str):
            raise InvalidRequestError("a prompt with multi_modal_data must be a text", "prompt")
        text = given
        for kind, placeholder in placeholders.texts.items():
            num_places, num_given = text.count(placeholder), sum(medium.modality == kind for medium in media)
            if num_places != num_given:
                raise InvalidRequestError(
                    f"the prompt has {num_places} times {placeholder!r}, which stands for the {kind}s, and {num_given} "
                    f"{kind}s in multi_modal_data: write it once for each, or use chat()",
                    "prompt",
                )

        def encode() -> EncodedPrompt:
            images = placeholders.expanded(text, media)
            ids, spans = images.spread(encoder.encode(images.text, "prompt", add_special_tokens=True, room=room))
            if len(encoder.truncated(ids, truncate_to, None, room)) < len(ids):
                raise InvalidRequestError("truncate_prompt_tokens would cut a prompt that has images", "prompt")
            encoder.check_prompt(ids, "prompt", room)
            return EncodedPrompt(images.text, ids, salt, media=spans)

        return await encoder.run(len(text), encode)

    async def render(
        self, conversation: Conversation, *, context: int, truncate_to: int | None, **fields: Any
    ) -> EncodedPrompt:
        """A conversation's prompt; `fields` are others of a chat completion's body. Raises InvalidRequestError."""
        prompts, parsers = self._chat(fields.pop("chat_template", None))
        with engine_errors():
            body, size = self._body(conversation, truncate_prompt_tokens=truncate_to, **fields)
            rendered, token_ids, media = await prompts.encode(body, request_tools(body), size, context)
        preface, frame = parsers.preface(rendered), parsers.frame(rendered)
        return EncodedPrompt(rendered.text, token_ids, None, preface, frame, media)

    def rendered(self, conversation: Conversation, **fields: Any) -> RenderedPrompt:
        """A conversation's prompt as text, of any length; `fields` are as in `render`. Called from any thread.

        Images in it become the model's placeholders, whether parts have them or are only {"type": "image"}. Raises
        InvalidRequestError.
        """
        prompts, _ = self._chat(fields.pop("chat_template", None))
        with engine_errors():
            body, _ = self._body(conversation, **fields)
            if self._placeholders is not None:
                for message in body.messages:
                    if isinstance(message.content, list):
                        message.content = [_unread(part) for part in message.content]
            return prompts.rendered(body, request_tools(body), expands_images=False)

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
            raw = msgspec.json.encode({**given, "messages": with_sent_images(conversation)})
        except TypeError as error:
            raise InvalidRequestError(f"the conversation cannot be written as JSON: {error}", "messages") from None
        body = self._decode(raw)
        body.check_supported()
        return body, len(raw)

    def _chat_of(self, template: str | None) -> tuple[RequestPrompts, AnswerParsers]:
        read = model_template(self._encoder.tokenizer, template or self._template, "auto", "auto")
        renderer = PromptRenderer(
            read.template,
            self._encoder,
            tools_as_text=read.formats.tools_as_text,
            placeholders=self._placeholders,
            images_in_place=self._images_in_place,
        )
        return RequestPrompts(self._encoder, renderer, self._images), AnswerParsers(
            read.formats, self._encoder.tokenizer
        )


def from_dict(prompt: Mapping[str, Any]) -> tuple[str | Sequence[int], str | None]:
    """A prompt that is a dict as a text or token ids, and its cache salt. Raises InvalidRequestError."""
    for name, why in _IDLE_FIELDS.items():
        if prompt.get(name) is not None:
            say_once(f"{name} has no effect: {why}")
    prompt = {name: value for name, value in prompt.items() if name not in _IDLE_FIELDS and value is not None}
    if unknown := [name for name in prompt if name not in _PROMPT_FIELDS]:
        raise InvalidRequestError(
            f"a prompt's {unknown[0]} is not supported: it may have {', '.join(sorted(_PROMPT_FIELDS))}", "prompt"
        )
    given = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if given is None:
        raise InvalidRequestError("a prompt that is a dict needs prompt or prompt_token_ids", "prompt")
    return cast("str | Sequence[int]", given), prompt.get("cache_salt")


def _unread(part: ContentPart) -> ContentPart:
    """A part, with nothing in place of an image."""
    if part.type in ("image", *IMAGE_PARTS):
        return ReadImage(part.type, media=_NOTHING)
    return ReadImage(part.type, media=replace(_NOTHING, modality="video")) if part.type in VIDEO_PARTS else part


def _token_ids(given: object) -> list[int]:
    try:
        return msgspec.convert(given, list[int])
    except msgspec.ValidationError:
        raise InvalidRequestError("a prompt must be a text, a list of token ids, or a dict with one of them") from None
