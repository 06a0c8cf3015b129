"""Paths without `/v1`, and SageMaker's `/invocations`, for what is served under `/v1`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import bad_request
from ..openapi.document import declared, operation

Handler = Callable[[Request], Awaitable[Response]]

# What tells a body's kind, and where it belongs.
_KINDS = (
    ("messages", "/v1/chat/completions"),
    ("prompt", "/v1/completions"),
    ("text_1", "/v1/score"),
    ("data_1", "/v1/score"),
    ("queries", "/v1/score"),
    ("query", "/v1/rerank"),
    ("input", "/v1/embeddings"),
)


def aliases(routes: Sequence[Route]) -> list[Route]:
    """The same handlers under paths without `/v1`, where nothing else is, and `/invocations`."""
    taken = {route.path for route in routes}
    short = [(route, path) for route in routes if (path := route.path.removeprefix("/v1")) not in taken]
    handlers = {route.path: route.endpoint for route in routes if "POST" in (route.methods or ())}
    return [
        *(Route(path, route.endpoint, methods=sorted(route.methods or ())) for route, path in short),
        Route("/invocations", _invocations(handlers), methods=["POST"]),
    ]


def _invocations(handlers: dict[str, Any]) -> Handler:
    described = (declared(Route("/", handlers[path])) for _, path in _KINDS)
    first = next(found for found in described if found is not None)  # without a chat model, those of chats are not

    @operation(
        "Answer what SageMaker sends: a body of chat completions, completions, embeddings, score or rerank",
        first.request,
        response=Any,
        example=first.example,
    )
    async def invocations(request: Request) -> Response:
        handler: Handler = handlers[_kind(await request.body())]
        return await handler(request)

    return invocations


def _kind(body: bytes) -> str:
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not a JSON object: {error}", code="invalid_json") from None
    for field, path in _KINDS:
        if field in given:
            return path
    fields = ", ".join(field for field, _ in _KINDS)
    raise bad_request(
        f"the body must have one of {fields}, which say what it asks for", code="missing_required_parameter"
    )
