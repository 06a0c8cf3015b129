"""`/v1/responses`: the chat path in the shapes of OpenAI's Responses API, with responses that the server keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from starlette.types import Scope

from tidewheel.engine.errors import quoted

from ..chat.field_names import renamed_fields
from ..chat.run import ChatRun, NamedEventStream
from ..errors import bad_request
from ..generation.frames import named_event, named_events
from ..http.api_keys import current_tenant
from ..openapi.document import operation
from ..protocol.chat import ChatCompletionRequest
from ..protocol.decode import BodyDecoder, unsupported
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
from ..responses.assembly import ResponseBuilder, new_item_id, new_response_id
from ..responses.background import BackgroundRun
from ..responses.offered_tools import OfferedTools
from ..responses.store import Responses, StoredResponse, held_bytes
from ..responses.translation import chat_request, prepare_body
from .app_state import AppState
from .body import whole_body
from .json_response import json_response

NEEDS_MODEL = "tidewheel.needs_model"
"""Where a request's scope has what waits for the end of all that goes on with the model when it is answered."""

_REFERENCES_AT_ONCE = 64  # are looked up before others have their turn


class _Ask(NamedTuple):
    """A decoded request: the items of earlier responses and its own, the chat request that they make, and its tools."""

    body: ResponsesRequest
    items: Sequence[Item]
    size: int  # bytes of JSON that the items came in
    held_bytes: int  # what they take in memory, by an estimate
    chat: ChatCompletionRequest
    names: Mapping[str, str]  # of the chat request's fields
    offered: OfferedTools


class ResponsesEndpoints:
    """Makes responses, and keeps those that clients want kept."""

    def __init__(self, state: AppState, store: Responses) -> None:
        self._path = state.path
        self._formatter = state.formatter
        self._metrics = state.metrics
        self._defaults = state.defaults
        self._store = store
        self._decode = BodyDecoder(ResponsesRequest, prepare_body, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/v1/responses", self._create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self._count_tokens, methods=["POST"]),
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
        ask = await self._understand(await whole_body(request))
        body = ask.body
        with renamed_fields(ask.names):
            if body.truncation == "auto":
                ask.chat.messages = await self._path.fitting_messages(ask.chat, ask.size, request.receive)
            run = await self._path.start(
                ask.chat, ask.size, timer, request.state.request_id, id_prefix="resp", receive=request.receive
            )
        encrypts_reasoning = ENCRYPTED_REASONING in (body.include or ())
        logprobs_of = partial(self._formatter.chat, ask.chat)
        builder = ResponseBuilder(
            self._response(body, run),
            logprobs_of,
            tools=ask.offered,
            encrypts_reasoning=encrypts_reasoning,
        )
        stored: StoredResponse | None = None
        if builder.response.store:
            stored = StoredResponse(builder.response, ask.items, ask.held_bytes, owner=current_tenant().owner)
        if body.background and stored is not None:
            stored.is_streamed = bool(body.stream)
            return await self._in_background(run, builder, stored, request.scope)
        if body.stream:
            return _ResponseStream(run, builder, lambda: self._keep(stored))
        await run.feed(request.receive, builder.push)
        for _ in builder.finish(run.usage()):
            pass
        await self._keep(stored)
        return json_response(builder.response)

    async def _in_background(
        self, run: ChatRun, builder: ResponseBuilder, stored: StoredResponse, scope: Scope
    ) -> HttpResponse:
        try:
            await self._store.add(stored)
            background = BackgroundRun(run, builder, lambda: self._store.update(stored), is_streamed=stored.is_streamed)
            stored.run = background
            scope.get(NEEDS_MODEL, []).append(background.ended)
        except BaseException:
            run.generation.close()
            await self._store.remove(builder.response.id)
            raise
        return stored.run.stream() if stored.is_streamed else json_response(builder.response)

    @operation("Count a conversation's tokens", ResponsesRequest, InputTokens, example={"input": "Who are you?"})
    async def _count_tokens(self, request: Request) -> HttpResponse:
        ask = await self._understand(await whole_body(request))
        with renamed_fields(ask.names):
            return json_response(InputTokens(await self._path.count_tokens(ask.chat, ask.size)))

    async def _understand(self, raw: bytearray) -> _Ask:
        body = self._decode(raw)
        body.check_input()
        if not self._store.is_enabled:
            for name in ("store", "background", "previous_response_id"):
                if getattr(body, name):
                    raise unsupported(
                        name, ": it keeps no responses (--max-stored-responses 0, or replicas without --shared-store)"
                    )
        earlier, size = await self._earlier(body.previous_response_id)
        items = await self._input(body)

        def translate() -> _Ask:
            for item in items:
                item.id = item.id or new_item_id(type(item))
            offered = OfferedTools(body.tools or ())
            chat, names = chat_request(body, earlier, items, offered, sees_images=self._path.sees_images)
            kept = [*earlier, *items]
            return _Ask(body, kept, size + len(raw), size + held_bytes(raw), chat, names, offered)

        return await self._path.translated(size + len(raw), translate)

    async def _earlier(self, response_id: str | None) -> tuple[Sequence[Item], int]:
        """The items up to and including a response's, and what they take in memory, by an estimate."""
        if response_id is None:
            return (), 0
        stored = await self._store.get(response_id)
        if stored is None:
            raise bad_request(
                f"previous_response_id: there is no response {quoted(response_id)}; {self._store.not_kept}",
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

    async def _input(self, body: ResponsesRequest) -> Sequence[Item]:
        """The request's own items, and the items of kept responses that it refers to."""
        if isinstance(body.input, str):
            return [Message(id=new_item_id(Message), role="user", content=body.input)]
        items: list[Item] = []
        for i, item in enumerate(body.input or ()):
            if isinstance(item, ItemReference):
                found = await self._store.output_item(item.id)
                if found is None:
                    raise bad_request(
                        f"input[{i}].id: no stored response has an item {quoted(item.id)}", f"input[{i}].id"
                    )
                items.append(found)
                if i % _REFERENCES_AT_ONCE == 0:
                    await asyncio.sleep(0)  # a store in memory waits for nothing
                continue
            items.append(item)
        return items

    def _response(self, body: ResponsesRequest, run: ChatRun) -> Response:
        store = self._store.is_enabled and body.store is not False
        text = body.text or TextConfig()
        return Response(
            id=new_response_id(),
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

    async def _keep(self, stored: StoredResponse | None) -> None:
        if stored is not None:
            await self._store.add(stored)


class _ResponseStream(NamedEventStream):
    """Streams a response, and keeps it before its last events are sent: clients that have read them may ask for it."""

    def __init__(self, run: ChatRun, builder: ResponseBuilder, keep: Callable[[], Awaitable[None]]) -> None:
        super().__init__(
            run,
            builder.push,
            begin=builder.begin,
            end=tuple,
            failed=lambda error: named_events(builder.fail(error)),
        )
        self._builder = builder
        self._keep = keep
        self._last: list[bytes] = []

    async def before_last(self) -> None:
        """See EventStream."""
        for event in self._builder.finish(self._run.usage()):
            self._last.append(named_event(event))
            await asyncio.sleep(0)
        await self._keep()

    def last_frames(self) -> Iterator[bytes]:
        """See EventStream."""
        return iter(self._last)
