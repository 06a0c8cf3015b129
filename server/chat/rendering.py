"""Renders a conversation as the text of a prompt: which template, which variables, and where the model continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import msgspec

from tidewheel.engine.media.media import Media

from ..errors import ApiError, bad_request
from ..generation.prompt_encoding import PromptEncoder
from ..protocol.chat import Message, Tool, check_parts
from ..protocol.decode import unsupported
from ..text_threads import INLINE_BYTES
from .harmony import is_harmony
from .harmony_messages import harmony_messages, harmony_variables
from .image_placeholders import MARKS, ImagePlaceholders, PromptImages, images_of
from .messages import template_messages, template_tools
from .request_templates import RequestTemplates
from .template_contents import (
    IMAGE_PART,
    IMAGE_URL_PART,
    has_marks,
    left_out,
    with_images_of_tools,
    with_parts,
    with_placeholders,
    with_reasoning,
    without_user_text,
)
from .template_environment import TemplateTimeError, time_limit
from .template_reading import TemplateReading
from .templates import ChatTemplate
from .tools_as_text import introduction, uses_tools, with_tools

T = TypeVar("T")

logger = logging.getLogger(__name__)

_INLINE_S = 0.02  # of processor time; templates take less than one millisecond for short conversations

# Marks the end of the final message while it is rendered. A private-use character, which conversations do not contain.
_END_OF_MESSAGE = "\U0010fffdend of message\U0010fffd"


_KNOWN_TO_ENCODERS = {"reasoning_effort", "thinking_budget"}
_MAX_TOOLS = 2**16  # bytes; mistral-common checks schemas in Python, and takes half a second for this many


class RenderedPrompt(NamedTuple):
    """A prompt's text, and whether the model continues the final message. Also the text of the final message, if it is
    the assistant's, the prompt's token ids, if they are not those of its text, and its images, if it has any.
    """

    text: str
    continues: bool
    spoken: str
    token_ids: list[int] | None = None
    images: PromptImages | None = None


class PromptRenderer:
    """Renders conversations. `variables` are the server's values for the template; a request's values override them.

    Requests may bring a template of their own only if there are `request_templates`, because a template is a program.
    """

    def __init__(
        self,
        template: ChatTemplate,
        encoder: PromptEncoder,
        variables: Mapping[str, Any] | None = None,
        request_templates: RequestTemplates | None = None,
        *,
        tools_as_text: bool = False,
        placeholders: ImagePlaceholders | None = None,
        images_in_place: bool = False,
    ) -> None:
        """With `tools_as_text` messages tell of tools, which the template does not show.

        `placeholders` are for models that see images; `images_in_place` is as in `with_placeholders`.
        """
        self._template = template
        self._placeholders = placeholders
        self._images_in_place = images_in_place
        self._tools_as_text = tools_as_text
        self._encoder = encoder
        self._variables = dict(variables or {})
        self._request_templates = request_templates
        self._is_slow = False

    async def run(self, size_bytes: int, template: str | None, work: Callable[[], T]) -> T:
        """The result of `work`, which calls `render` with this template. Without a template, as `PromptEncoder.run`.

        With a template, `work` runs in threads of its own. Raises ApiError if requests may not bring templates (400),
        if too many wait already (429), or if it takes longer than a request may take (504).
        """
        if template is None:
            return await self._run_own(size_bytes, work)
        return await self._for_requests().run(work)

    async def _run_own(self, size_bytes: int, work: Callable[[], T]) -> T:
        """With the model's own template, which comes from anywhere: if it is slow, the event loop does not run it."""
        if size_bytes <= INLINE_BYTES and not self._is_slow:
            try:
                with time_limit(_INLINE_S):
                    return work()
            except TemplateTimeError:
                self._is_slow = True
                logger.warning(
                    "The chat template takes more than %g ms: it is rendered in threads from now on", _INLINE_S * 1000
                )
        return await self._encoder.run_in_thread(work)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        expands_images: bool = True,
    ) -> RenderedPrompt:
        """The prompt. With `continue_final_message` it ends where the text of the final message ends.

        Without `expands_images` its text has placeholders for images, as the template writes them.

        Raises ApiError (400) naming the field that cannot be used, or with the template's own complaint.
        """
        self._encoder.tokenizer.require_text("messages")
        check_parts(len(messages), "messages")
        context = {**self._variables, **(variables or {})}
        media = images_of(messages)
        if media:
            assert self._placeholders is not None, "images are read only for a model that sees them"
            messages, context = self._placeholders.without([*messages]), self._placeholders.without(context)
            tools = None if tools is None else self._placeholders.without([*tools])
        rendered = template_messages(messages, sees_images=self._placeholders is not None)
        final = rendered[-1]
        content: str = final["content"]
        spoken = content if final["role"] == "assistant" else ""
        if self._encoder.tokenizer.chat is not None:
            if media:
                raise unsupported(
                    "messages", " with images: --tokenizer-mode mistral encodes text only; start the server without it"
                )
            return self._encoded(rendered, tools, context, template, spoken, continues=bool(continue_final_message))
        if not continue_final_message:
            opens_turn = add_generation_prompt is not False
            text = self._text(template, rendered, messages, tools, add_generation_prompt=opens_turn, variables=context)
            return self._with_images(RenderedPrompt(text, False, spoken), media, expands=expands_images)
        if add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        if "tool_calls" in final:
            raise bad_request(
                "continue_final_message: the final message has tool calls, which end a turn", "continue_final_message"
            )
        final["content"] = content + _END_OF_MESSAGE
        text = self._text(template, rendered, messages, tools, add_generation_prompt=False, variables=context)
        text, found, _ = text.rpartition(_END_OF_MESSAGE)
        if not found:
            raise bad_request(
                "continue_final_message: the chat template leaves the final message out", "continue_final_message"
            )
        return self._with_images(RenderedPrompt(text, True, spoken), media, expands=expands_images)

    def _with_images(self, prompt: RenderedPrompt, media: Sequence[Media], *, expands: bool) -> RenderedPrompt:
        """The prompt with what stands for its images in place of placeholders, if that is wanted."""
        if not media:
            return prompt
        placeholders = self._placeholders
        assert placeholders is not None
        spoken = placeholders.restored(prompt.spoken)
        if not expands:
            return prompt._replace(text=placeholders.restored(prompt.text), spoken=spoken)
        images = placeholders.expanded(prompt.text, media)
        return prompt._replace(text=images.text, spoken=spoken, images=images)

    def _encoded(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Tool] | None,
        variables: Mapping[str, Any],
        template: str | None,
        spoken: str,
        *,
        continues: bool,
    ) -> RenderedPrompt:
        """By a tokenizer that encodes conversations itself."""
        tokenizer = self._encoder.tokenizer
        assert tokenizer.chat is not None
        if template is not None:
            raise bad_request("chat_template cannot be used: this model's chats have no template", "chat_template")
        effort = variables.get("reasoning_effort")
        if unknown := variables.keys() - _KNOWN_TO_ENCODERS - ({"enable_thinking"} if effort is not None else set()):
            raise bad_request(
                f"chat_template_kwargs: this model's chats have no template; {', '.join(sorted(unknown)):.100} has "
                "no effect without one; send only reasoning_effort",
                "chat_template_kwargs",
            )
        self._encoder.check_size(sum(map(_size, messages)), "messages")
        if (size := len(msgspec.json.encode(tools or []))) > _MAX_TOOLS:
            raise bad_request(
                f"tools has {size} bytes, and this model's chat format takes at most {_MAX_TOOLS}", "tools"
            )
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = str(call["function"]["arguments"])
        ids = tokenizer.chat.encode(
            messages, template_tools(tools), continue_final_message=continues, reasoning_effort=effort
        )
        return RenderedPrompt(tokenizer.decode(ids, skip_special_tokens=False), continues, spoken, ids)

    def _text(
        self,
        source: str | None,
        rendered: list[dict[str, Any]],
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        **options: Any,
    ) -> str:
        """The prompt's text, with contents in the form in which the template shows the last user message."""
        offered, introduced = template_tools(tools), ""
        num_images = sum(message["content"].count(mark) for message in rendered for mark in MARKS.values())
        if self._template.is_harmony if source is None else is_harmony(source):
            options["variables"] = harmony_variables(options["variables"])
            forms: Iterable[list[dict[str, Any]]] = [harmony_messages(rendered)]
        else:
            # A request's template is not read here, which may take long: what it shows tells what it reads.
            reading = self._template.reading(bool(tools)) if source is None else TemplateReading()
            conversations = [with_reasoning(rendered, reading)]
            originals: Sequence[Message] | None = messages
            if self._tools_as_text and (source is None or "tools" not in source) and (offered or uses_tools(rendered)):
                introduced, originals = introduction(offered) if offered else "", None
                conversations = [with_tools(conversations[0], introduced, in_system=i) for i in (True, False)]
            forms = self._forms(conversations, originals, parts_first=reading.parts)
        refusal: ApiError | None = None
        for i, form in enumerate(forms):
            try:
                text = self._written(source, form, offered, **options)
            except ApiError as error:  # the template does not take this form, such as a system message
                if i == 0 and not introduced and not num_images:
                    raise
                refusal = refusal or error
                continue
            num_shown = self._num_shown(text) if num_images else 0
            if num_shown > num_images:
                raise bad_request(
                    f"messages has {num_images} images, and the chat template shows {num_shown} of them: perhaps "
                    "parts of texts together are what stands for an image; leave that out",
                    "messages",
                )
            if num_shown < num_images:
                continue
            if introduced in text and self._shows_user(source, form, text, offered, **options):
                return text
        if refusal is None and num_images:
            raise bad_request(
                f"messages: the chat template does not show the {num_images} images of these messages; put them into "
                "messages of the user, or use another template (--chat-template)",
                "messages",
            )
        raise refusal or bad_request(
            "messages: the chat template leaves out the last user message, so the model would not see it; use "
            "another template (--chat-template), or other roles",
            "messages",
        )

    def _forms(
        self,
        conversations: Sequence[list[dict[str, Any]]],
        messages: Sequence[Message] | None,
        *,
        parts_first: bool,
    ) -> Iterator[list[dict[str, Any]]]:
        """The forms of a conversation to try, of which the conversations are some with contents as texts.

        Images are in parts if the template shows them so, because their placeholders have words around them there.
        """
        if self._placeholders is None or not any(has_marks(message["content"]) for message in conversations[0]):
            for texts in conversations:
                yield from _in_order(texts, with_parts(texts, messages), parts_first=parts_first)
            return
        moved = [with_images_of_tools(texts) for texts in conversations]
        for image in (IMAGE_PART, IMAGE_URL_PART):
            for texts, originals in (*zip(conversations, repeat(messages)), *zip(moved, repeat(None))):
                some = with_parts(texts, originals, image=image, only_with_images=True)
                yield from _in_order(some, with_parts(texts, originals, image=image), parts_first=parts_first)
        for texts in (*conversations, *moved):
            yield with_placeholders(texts, self._placeholders.texts, in_place=self._images_in_place)

    def _num_shown(self, text: str) -> int:
        """How many media a rendered text shows."""
        texts = {} if self._placeholders is None else self._placeholders.texts
        return sum(map(text.count, texts.values()))

    def _shows_user(
        self,
        source: str | None,
        messages: Sequence[Mapping[str, Any]],
        text: str,
        tools: Sequence[Mapping[str, Any]] | None,
        **options: Any,
    ) -> bool:
        """Whether `text`, the prompt of these messages, shows what the last user message says."""
        if not left_out(messages, text):
            return True
        marked, mark = without_user_text(messages)
        try:
            return mark in self._written(source, marked, tools, **options)
        except ApiError:
            return True  # what the message says decides whether the template takes it, so the template has read it

    def _written(
        self,
        source: str | None,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        **options: Any,
    ) -> str:
        if source is None:
            return self._template.render(messages, tools, **options)
        return self._for_requests().render(source, self._template.context(messages, tools, **options))

    def _for_requests(self) -> RequestTemplates:
        if self._request_templates is None:
            raise bad_request(
                "this server does not accept chat_template in requests; start it with --trust-request-chat-template "
                "to allow it, or with --chat-template to set one for all requests",
                "chat_template",
                "unsupported_parameter",
            )
        return self._request_templates


def _in_order(
    texts: list[dict[str, Any]], parts: list[dict[str, Any]], *, parts_first: bool
) -> tuple[list[dict[str, Any]], ...]:
    return (parts, texts) if parts_first else (texts, parts)


def _size(message: Mapping[str, Any]) -> int:
    """About how many characters a message has that are encoded."""
    calls = message.get("tool_calls", ())
    return len(message["content"]) + sum(len(str(call["function"]["arguments"])) for call in calls)
