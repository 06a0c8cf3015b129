"""`/v1/responses`: the chat path in the shapes of OpenAI's Responses API, with responses that the server keeps."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from tidewheel.engine.errors import quoted

from ..chat.field_names import renamed_fields
from ..chat.path import ChatPath
from ..chat.run import ChatRun, NamedEventStream
from ..errors import ApiError, bad_request
from ..generation.frames import named_events
from ..generation.logprobs import LogprobsFormatter
from ..openapi.document import operation
from ..protocol.chat import ChatCompletionRequest
from ..protocol.decode import BodyDecoder, ParameterNotes, unsupported
from ..protocol.response_events import ResponseEvent
from ..protocol.response_items import Item, ItemReference, Message
from ..protocol.responses import (
    ENCRYPTED_REASONING,
    InputTokens,
    PlainFormat,
    ReasoningConfig,
    Response,
    ResponsesRequest,
    TextConfig,
)
from ..responses.assembly import ResponseBuilder, new_item_id
from ..responses.background import BackgroundRun
from ..responses.store import NOT_KEPT, ResponseStore, StoredResponse
from ..responses.translation import chat_request, prepare_body
from ..telemetry.metrics import ServerMetrics
from .body import whole_body
from .json_response import json_response


class _Ask(NamedTuple):
    """A decoded request: the items of earlier responses and its own, and the chat request that they make."""

    body: ResponsesRequest
    items: Sequence[Item]
    size: int  # bytes of JSON that the items came in
    chat: ChatCompletionRequest
    names: Mapping[str, str]  # of the chat request's fields


class ResponsesEndpoints:
    """Makes responses, and keeps those that clients want kept. `defaults` are the model's own sampling parameters."""

    def __init__(
        self,
        path: ChatPath,
        formatter: LogprobsFormatter,
        metrics: ServerMetrics,
        defaults: Mapping[str, float | int],
        store: ResponseStore,
        *,
        notes: ParameterNotes,
    ) -> None:
        self._path = path
        self._formatter = formatter
        self._metrics = metrics
        self._defaults = defaults
        self._store = store
        self._decode = BodyDecoder(ResponsesRequest, prepare_body, notes=notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/v1/responses", self._create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self._count_tokens, methods=["POST"]),
            Route("/v1/responses/compact", self._compact, methods=["POST"]),
        ]

    @operation(
        "Answer a conversation in the shapes of the Responses API",
        ResponsesRequest,
        Response,
        events=ResponseEvent,
        example={"input": "Who are you?", "max_output_tokens": 32},
    )
    async def _create(self, request: Request) -> HttpResponse:
        timer = self._metrics.start_timer()
        ask = self._understand(await whole_body(request))
        body = ask.body
        with renamed_fields(ask.names):
            if body.truncation == "auto":
                ask.chat.messages = await self._path.fitting_messages(ask.chat, ask.size)
            run = await self._path.start(ask.chat, ask.size, timer, request.state.request_id, id_prefix="resp")
        encrypts_reasoning = ENCRYPTED_REASONING in (body.include or ())
        logprobs_of = partial(self._formatter.chat, ask.chat)
        builder = ResponseBuilder(self._response(body, run), logprobs_of, encrypts_reasoning=encrypts_reasoning)
        stored = StoredResponse(builder.response, ask.items, ask.size) if builder.response.store else None
        if body.background and stored is not None:
            return self._in_background(run, builder, stored, is_streamed=bool(body.stream))

        def finish() -> Iterator[ResponseEvent]:
            yield from builder.finish(run.usage())
            self._keep(stored)

        if body.stream:
            return NamedEventStream(run, builder.push, begin=builder.begin, end=finish, failed=_failed(builder))
        await run.feed(request.receive, builder.push)
        for _ in finish():
            pass
        return json_response(builder.response)

    def _in_background(
        self, run: ChatRun, builder: ResponseBuilder, stored: StoredResponse, *, is_streamed: bool
    ) -> HttpResponse:
        try:
            self._store.add(stored)
            stored.run = BackgroundRun(run, builder, lambda: self._keep_ended(stored), is_streamed=is_streamed)
        except BaseException:
            self._store.remove(builder.response.id)
            run.generation.close()
            raise
        return stored.run.stream() if is_streamed else json_response(builder.response)

    @operation("Count a conversation's tokens", ResponsesRequest, InputTokens, example={"input": "Who are you?"})
    async def _count_tokens(self, request: Request) -> HttpResponse:
        ask = self._understand(await whole_body(request))
        with renamed_fields(ask.names):
            return json_response(InputTokens(await self._path.count_tokens(ask.chat, ask.size)))

    @operation("Refused: conversations are not compacted")
    async def _compact(self, request: Request) -> HttpResponse:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            'this server does not compact conversations; ask for "truncation": "auto", or leave items out',
        )

    def _understand(self, raw: bytearray) -> _Ask:
        body = self._decode(raw)
        body.check_input()
        if not self._store.is_enabled:
            for name in ("store", "background", "previous_response_id"):
                if getattr(body, name):
                    raise unsupported(name, ": it keeps no responses (--max-stored-responses 0)")
        earlier, size = self._earlier(body.previous_response_id)
        items = self._input(body)
        chat, names = chat_request(body, earlier, items)
        return _Ask(body, [*earlier, *items], len(raw) + size, chat, names)

    def _earlier(self, response_id: str | None) -> tuple[Sequence[Item], int]:
        """The items up to and including a response's, and their size in bytes."""
        if response_id is None:
            return (), 0
        stored = self._store.get(response_id)
        if stored is None:
            raise bad_request(
                f"previous_response_id: there is no response {quoted(response_id)}; {NOT_KEPT}",
                "previous_response_id",
                "previous_response_not_found",
            )
        if stored.response.status not in ("completed", "incomplete"):
            raise bad_request(
                f"previous_response_id: the response {quoted(response_id)} is {stored.response.status}; a conversation "
                "goes on from one that is completed or incomplete",
                "previous_response_id",
            )
        return stored.conversation, stored.size

    def _input(self, body: ResponsesRequest) -> Sequence[Item]:
        """The request's own items, each with an id."""
        if isinstance(body.input, str):
            return [Message(id=new_item_id(Message), role="user", content=body.input)]
        items: list[Item] = []
        for i, item in enumerate(body.input or ()):
            if isinstance(item, ItemReference):
                found = self._store.output_item(item.id)
                if found is None:
                    raise bad_request(
                        f"input[{i}].id: no stored response has an item {quoted(item.id)}", f"input[{i}].id"
                    )
                items.append(found)
                continue
            item.id = item.id or new_item_id(type(item))
            items.append(item)
        return items

    def _response(self, body: ResponsesRequest, run: ChatRun) -> Response:
        store = self._store.is_enabled and body.store is not False
        text = body.text or TextConfig()
        return Response(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=run.created,
            status="queued" if body.background else "in_progress",
            background=bool(body.background),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            model=run.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=body.reasoning or ReasoningConfig(),
            safety_identifier=body.safety_identifier,
            store=store,
            temperature=self._number(body.temperature, "temperature"),
            text=TextConfig(text.format or PlainFormat(), text.verbosity),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=self._number(body.top_p, "top_p"),
            truncation=body.truncation or "disabled",
            user=body.user,
        )

    def _number(self, value: float | None, name: str) -> float:
        return float(self._defaults.get(name, 1.0) if value is None else value)

    def _keep(self, stored: StoredResponse | None) -> None:
        if stored is not None:
            self._store.add(stored)

    def _keep_ended(self, stored: StoredResponse) -> None:
        if self._store.get(stored.response.id) is stored:  # and not deleted meanwhile
            self._store.add(stored)


def _failed(builder: ResponseBuilder) -> Callable[[ApiError], bytes]:
    return lambda error: named_events(builder.fail(error))
