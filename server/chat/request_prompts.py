"""RequestPrompts: renders and encodes the prompts of chat requests, counts their tokens, and shortens them."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import structs
from starlette.types import Receive

from tidewheel.engine.media.media import MediaSpan

from ..errors import bad_request
from ..generation.prompt_encoding import PromptEncoder
from ..protocol.chat import ChatCompletionRequest, Message, check_parts, frames_per_second
from .image_placeholders import PromptImages
from .rendering import PromptRenderer, RenderedPrompt
from .request_images import RequestImages
from .tools.tool_choice import RequestTools, request_tools
from .truncation import drop_oldest_turns


class EncodedPrompt(NamedTuple):
    """A prompt, its token ids, and where images take the place of them."""

    prompt: RenderedPrompt
    token_ids: list[int]
    media: tuple[MediaSpan, ...] = ()


class RequestPrompts:
    """Makes prompts. `raw_size` is the size of a request's body in bytes: large bodies are encoded in a thread.

    Images that a request has are read first.
    """

    def __init__(self, encoder: PromptEncoder, renderer: PromptRenderer, images: RequestImages) -> None:
        self._encoder = encoder
        self._renderer = renderer
        self._images = images

    async def encode(
        self,
        body: ChatCompletionRequest,
        tools: RequestTools,
        raw_size: int,
        context: int,
        receive: Receive | None = None,
    ) -> EncodedPrompt:
        """A request's prompt and its token ids, within a context of `context` tokens. Raises ApiError (400) if the
        prompt cannot be made, and ClientGone as RequestImages.read does.
        """
        encoder = self._encoder.within(context)
        await self._read_media(body, raw_size, context, receive)
        return await self._renderer.run(raw_size, body.chat_template, lambda: self._encoded(encoder, body, tools))

    async def count(self, body: ChatCompletionRequest, raw_size: int) -> int:
        """How many tokens a request's prompt has, even if it is too long for the context."""

        def count() -> int:
            prompt, special = self.rendered(body, request_tools(body)), bool(body.add_special_tokens)
            return len(counted(self._encoder, prompt, add_special_tokens=special))

        await self._read_media(body, raw_size, self._encoder.max_counted)
        return await self._renderer.run(raw_size, body.chat_template, count)

    async def fitting_messages(
        self, body: ChatCompletionRequest, raw_size: int, context: int, receive: Receive | None = None
    ) -> list[Message]:
        """The request's messages. Oldest turns are dropped, as few as possible, until the prompt fits the context."""
        check_parts(len(body.messages), "messages")
        encoder, tools = self._encoder.within(context), request_tools(body)

        def fits(messages: list[Message]) -> bool:
            if len(messages) >= encoder.max_model_len:  # each has a token at least
                return False
            prompt = self.rendered(structs.replace(body, messages=messages), tools)
            if prompt.token_ids is not None:
                return len(prompt.token_ids) < encoder.max_model_len
            room = encoder.max_model_len - (0 if prompt.images is None else prompt.images.num_more_tokens)
            return room > 1 and encoder.within(room).fits(prompt.text, add_special_tokens=bool(body.add_special_tokens))

        await self._read_media(body, raw_size, None, receive)
        return await self._renderer.run(raw_size, body.chat_template, lambda: drop_oldest_turns(body.messages, fits))

    def rendered(
        self, body: ChatCompletionRequest, tools: RequestTools, *, expands_images: bool = True
    ) -> RenderedPrompt:
        """A request's prompt as text, of which images were read. Raises ApiError (400) if it cannot be made.

        `expands_images` is as in PromptRenderer.
        """
        variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.enable_thinking is not None:
            variables.setdefault("enable_thinking", body.enable_thinking)
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
            if body.reasoning_effort == "none":
                variables.setdefault("enable_thinking", False)
        if body.thinking_token_budget is not None and body.thinking_token_budget >= 0:
            variables.setdefault("thinking_budget", body.thinking_token_budget)
        if body.documents is not None:
            variables["documents"] = body.documents
        return self._renderer.render(
            body.messages,
            tools.offered,
            variables=variables,
            template=body.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            expands_images=expands_images,
        )

    async def _read_media(
        self, body: ChatCompletionRequest, raw_size: int, context: int | None, receive: Receive | None = None
    ) -> None:
        settings, fps = body.mm_processor_kwargs, frames_per_second(body.media_io_kwargs)
        salt = body.cache_salt
        await self._images.read(body.messages, raw_size, context, receive, settings=settings, fps=fps, salt=salt)

    def _encoded(self, encoder: PromptEncoder, body: ChatCompletionRequest, tools: RequestTools) -> EncodedPrompt:
        prompt = self.rendered(body, tools)
        limit, side = body.truncate_prompt_tokens, body.truncation_side
        media: tuple[MediaSpan, ...] = ()
        if prompt.token_ids is not None:
            token_ids = encoder.truncated(prompt.token_ids, limit, side)
        elif prompt.images is not None:
            token_ids, media = self._with_images(encoder, prompt, prompt.images, body)
        else:
            token_ids = encoder.encode(
                prompt.text,
                "messages",
                add_special_tokens=bool(body.add_special_tokens),  # the template writes them itself
                truncate_to=limit,
                side=side,
            )
        encoder.check_prompt(token_ids, "messages")
        return EncodedPrompt(prompt, token_ids, media)

    def _with_images(
        self, encoder: PromptEncoder, prompt: RenderedPrompt, images: PromptImages, body: ChatCompletionRequest
    ) -> tuple[list[int], tuple[MediaSpan, ...]]:
        special = bool(body.add_special_tokens)
        token_ids, media = images.spread(encoder.encode(prompt.text, "messages", add_special_tokens=special))
        if len(encoder.truncated(token_ids, body.truncate_prompt_tokens, None)) < len(token_ids):
            raise bad_request(
                f"truncate_prompt_tokens would cut a prompt of {len(token_ids)} tokens that has images: leave out the "
                "oldest messages, or truncate_prompt_tokens",
                "truncate_prompt_tokens",
            )
        return token_ids, media


def counted(encoder: PromptEncoder, prompt: RenderedPrompt, *, add_special_tokens: bool) -> list[int]:
    """The token ids of a conversation's prompt, which may be longer than the context. Raises ApiError (400)."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    token_ids = encoder.count(prompt.text, "messages", add_special_tokens=add_special_tokens)
    return token_ids if prompt.images is None else prompt.images.spread(token_ids)[0]
