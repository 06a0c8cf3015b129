"""RequestPrompts: renders and encodes the prompts of chat requests, counts their tokens, and shortens them."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from ..generation.prompt_encoding import PromptEncoder
from ..protocol.chat import ChatCompletionRequest, Message, check_parts
from .rendering import PromptRenderer, RenderedPrompt
from .tools.tool_choice import RequestTools, request_tools
from .truncation import drop_oldest_turns


class RequestPrompts:
    """Makes prompts. `raw_size` is the size of a request's body in bytes: large bodies are encoded in a thread."""

    def __init__(self, encoder: PromptEncoder, renderer: PromptRenderer) -> None:
        self._encoder = encoder
        self._renderer = renderer

    async def encode(
        self, body: ChatCompletionRequest, tools: RequestTools, raw_size: int, context: int
    ) -> tuple[RenderedPrompt, list[int]]:
        """A request's prompt and its token ids, within a context of `context` tokens. Raises ApiError (400) if the
        prompt cannot be made.
        """
        encoder = self._encoder.within(context)
        return await self._renderer.run(raw_size, body.chat_template, lambda: self._encoded(encoder, body, tools))

    async def count(self, body: ChatCompletionRequest, raw_size: int) -> int:
        """How many tokens a request's prompt has, even if it is too long for the context."""

        def count() -> int:
            prompt, special = self.rendered(body, request_tools(body)), bool(body.add_special_tokens)
            if prompt.token_ids is not None:
                return len(prompt.token_ids)
            return len(self._encoder.count(prompt.text, "messages", add_special_tokens=special))

        return await self._renderer.run(raw_size, body.chat_template, count)

    async def fitting_messages(self, body: ChatCompletionRequest, raw_size: int, context: int) -> list[Message]:
        """The request's messages. Oldest turns are dropped, as few as possible, until the prompt fits the context."""
        check_parts(len(body.messages), "messages")
        encoder, tools = self._encoder.within(context), request_tools(body)

        def fits(messages: list[Message]) -> bool:
            if len(messages) >= encoder.max_model_len:  # each has a token at least
                return False
            prompt = self.rendered(structs.replace(body, messages=messages), tools)
            if prompt.token_ids is not None:
                return len(prompt.token_ids) < encoder.max_model_len
            return encoder.fits(prompt.text, add_special_tokens=bool(body.add_special_tokens))

        return await self._renderer.run(raw_size, body.chat_template, lambda: drop_oldest_turns(body.messages, fits))

    def rendered(self, body: ChatCompletionRequest, tools: RequestTools) -> RenderedPrompt:
        """A request's prompt as text. Raises ApiError (400) if it cannot be made."""
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
        )

    def _encoded(
        self, encoder: PromptEncoder, body: ChatCompletionRequest, tools: RequestTools
    ) -> tuple[RenderedPrompt, list[int]]:
        prompt = self.rendered(body, tools)
        limit, side = body.truncate_prompt_tokens, body.truncation_side
        if prompt.token_ids is not None:
            token_ids = encoder.truncated(prompt.token_ids, limit, side)
        else:
            token_ids = encoder.encode(
                prompt.text,
                "messages",
                add_special_tokens=bool(body.add_special_tokens),  # the template writes them itself
                truncate_to=limit,
                side=side,
            )
        encoder.check_prompt(token_ids, "messages")
        return prompt, token_ids
