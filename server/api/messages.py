"""`/v1/messages`: the chat path in Anthropic's shapes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..anthropic.assembly import MessageBuilder
from ..anthropic.translation import chat_request
from ..chat.field_names import renamed_fields
from ..chat.run import NamedEventStream
from ..openapi.document import operation
from ..protocol.chat import ChatCompletionRequest
from ..protocol.decode import BodyDecoder
from ..protocol.errors import AnthropicErrorResponse
from ..protocol.message_answers import MessageEvent, OutputMessage, TokenCount
from ..protocol.messages import CountTokensRequest, MessagesRequest, ThinkingAdaptive, ThinkingEnabled
from .app_state import AppState
from .body import whole_body
from .json_response import json_response


class MessagesEndpoints:
    """Answers conversations in Anthropic's shapes, and counts their tokens."""

    def __init__(self, state: AppState) -> None:
        self._path = state.path
        self._metrics = state.metrics
        self._decode = BodyDecoder(MessagesRequest, notes=state.notes)
        self._decode_count = BodyDecoder(CountTokensRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/v1/messages", self._create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
        ]

    @operation(
        "Answer a conversation in Anthropic's shapes",
        MessagesRequest,
        OutputMessage,
        events=MessageEvent,
        error=AnthropicErrorResponse,
        example={"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 32},
    )
    async def _create(self, request: Request) -> Response:
        timer = self._metrics.start_timer()
        raw = await whole_body(request)
        body = self._decode(raw)
        chat, names = await self._path.translated(len(raw), lambda: self._translated(body))
        if self._path.reads_reasoning:  # without that nothing is thinking
            chat.thinking_token_budget = body.thinking_budget
        with renamed_fields(names):
            run = await self._path.start(
                chat, len(raw), timer, request.state.request_id, id_prefix="msg", receive=request.receive
            )
        thinking = body.thinking
        hides_thinking = isinstance(thinking, ThinkingEnabled | ThinkingAdaptive) and thinking.display == "omitted"
        most = run.max_tokens or body.max_tokens
        builder = MessageBuilder(run.model, run.usage, most, shows_thinking=not hides_thinking)
        if body.stream:
            request_id = request.state.request_id
            return NamedEventStream(
                run, builder.push, end=builder.finish, failed=lambda error: error.anthropic_event(request_id)
            )
        await run.feed(request.receive, builder.push)
        for _ in builder.finish():
            pass
        return json_response(builder.message)

    def _translated(self, body: CountTokensRequest) -> tuple[ChatCompletionRequest, dict[str, str]]:
        return chat_request(body, sees_images=self._path.sees_images)

    @operation(
        "Count a conversation's tokens",
        CountTokensRequest,
        TokenCount,
        error=AnthropicErrorResponse,
        example={"messages": [{"role": "user", "content": "Who are you?"}]},
    )
    async def _count_tokens(self, request: Request) -> Response:
        raw = await whole_body(request)
        body = self._decode_count(raw)
        chat, names = await self._path.translated(len(raw), lambda: self._translated(body))
        with renamed_fields(names):
            return json_response(TokenCount(await self._path.count_tokens(chat, len(raw))))
