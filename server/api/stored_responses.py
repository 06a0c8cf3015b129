"""`/v1/responses/{id}`: responses that are kept, and those that run in the background."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.errors import quoted, shortened

from ..errors import ApiError, bad_request
from ..openapi.document import operation
from ..protocol.decode import documented, unsupported
from ..protocol.response_events import ResponseEvent
from ..protocol.response_items import InputText, Item, ItemList, Message, OutputText
from ..protocol.responses import DeletedResponse, check_include
from ..protocol.responses import Response as ResponseObject
from ..responses.store import Responses, StoredResponse
from .json_response import json_response

_MAX_PAGE = 100


class RetrieveQuery(msgspec.Struct):
    """How a response is shown: whole, or its events from that one on."""

    stream: bool = False
    starting_after: int = -1
    include: list[str] = []
    include_obfuscation: bool = False


class InputItemsQuery(msgspec.Struct):
    """Which page of the items."""

    order: Literal["asc", "desc"] = "desc"
    limit: Annotated[int, documented(minimum=1, maximum=_MAX_PAGE)] = 20
    after: str | msgspec.UnsetType = msgspec.UNSET
    include: list[str] = []


class StoredResponsesEndpoints:
    """Shows, deletes and cancels what is in a store."""

    def __init__(self, store: Responses) -> None:
        self._store = store

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/v1/responses/{id}", self._retrieve),
            Route("/v1/responses/{id}", self._delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self._cancel, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", self._input_items),
        ]

    @operation("One kept response", response=ResponseObject, events=ResponseEvent, query=RetrieveQuery)
    async def _retrieve(self, request: Request) -> Response:
        stored = await self._stored(request)
        query = request.query_params
        check_include([*query.getlist("include"), *query.getlist("include[]")])
        if query.get("include_obfuscation") == "true":
            raise unsupported("include_obfuscation", " unless it is false")
        if query.get("stream") != "true":
            return json_response(stored.response)
        if stored.run is None or stored.run.log is None:
            raise bad_request(
                "stream: this response has no events to stream; only one that was created with background and "
                "stream has",
                "stream",
            )
        return stored.run.stream(max(_integer(request, "starting_after", -1) + 1, 0))

    @operation("Forget a response", response=DeletedResponse)
    async def _delete(self, request: Request) -> Response:
        stored = await self._stored(request)
        if stored.run is not None:
            await stored.run.cancel()
        await self._store.remove(stored.response.id)
        return json_response(DeletedResponse(stored.response.id))

    @operation("End a response that runs in the background", response=ResponseObject)
    async def _cancel(self, request: Request) -> Response:
        stored = await self._stored(request)
        if stored.run is None:
            raise bad_request("only a response that was created with background can be cancelled", "response_id")
        await stored.run.cancel()
        return json_response((await self._stored(request)).response)

    @operation("The items that a response was made from", response=ItemList, query=InputItemsQuery)
    async def _input_items(self, request: Request) -> Response:
        items = [_listed(item) for item in (await self._stored(request)).items]
        query = request.query_params
        check_include([*query.getlist("include"), *query.getlist("include[]")])
        order, limit, after = query.get("order", "desc"), _integer(request, "limit", 20), query.get("after")
        if order not in ("asc", "desc"):
            raise bad_request(f"order must be asc or desc, got {quoted(order)}", "order")
        if not 1 <= limit <= _MAX_PAGE:
            raise bad_request(f"limit must be between 1 and {_MAX_PAGE}, got {shortened(str(limit))}", "limit")
        if order == "desc":
            items.reverse()
        if after is not None:
            ids = [item.id for item in items]
            if after not in ids:
                raise bad_request(f"after: there is no item {quoted(after)} in this response's input", "after")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return json_response(
            ItemList(data=page, first_id=first or None, last_id=last or None, has_more=len(items) > limit)
        )

    async def _stored(self, request: Request) -> StoredResponse:
        response_id = request.path_params["id"]
        stored = await self._store.get(response_id)
        if stored is None:
            message = f"there is no response {quoted(response_id)}; {self._store.not_kept}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="response_id")
        return stored


def _listed(item: Item) -> Item:
    """An item as lists have it: with its content as a list."""
    if not isinstance(item, Message) or not isinstance(item.content, str):
        return item
    part = OutputText(item.content) if item.role == "assistant" else InputText(item.content)
    return msgspec.structs.replace(item, content=[part])


def _integer(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise bad_request(f"{name} must be a whole number, got {quoted(text)}", name) from None
