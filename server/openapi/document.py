"""`/openapi.json`: the routes, and what `@operation` says of their handlers, as an OpenAPI 3.1 document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.routing import BaseRoute, Route

from tidewheel import __version__
from tidewheel.engine.declaring.record import record

from ..protocol.errors import ErrorResponse
from .tags import REF, Schema, reachable, relax_tags

HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

_ATTRIBUTE = "openapi_operation"
_REFUSALS = {
    "400": "The body does not match this description; the error names the field and what is wrong with it",
    "413": "The body is too large, or has too many values",
    "415": "The body was not sent as JSON",
}
_NEEDS_ADMINISTRATOR = "This changes the server for everyone, and the key does not have the right admin"
_NEEDS_PRIORITY = "The priority is below 0, and the key does not have the right priority"
_REFUSALS_OF_WAITING = {
    "429": "Too many requests wait already; the header retry-after says how many seconds to wait",
    "503": "The server cannot answer now, or is shutting down",
    "504": "The answer took longer than the server allows",
}


@record(frozen=True, slots=True, kw_only=True)
class Operation:
    """What a handler takes and gives, for the document. All types are msgspec's to describe.

    `request` is a JSON body's type, `query` a struct of query parameters, `response` the answer's type (None: it has no
    body), `events` the type of one event's data where answers can be streamed (`stream_type` says how), `example` a
    body to try. `waits` says that a request with a body may have to wait for others, and is refused when too many wait.
    `administers` says that it changes the server for all.
    """

    summary: str
    request: Any = None
    response: Any = None
    events: Any = None
    query: type[msgspec.Struct] | None = None
    media_type: str = "application/json"
    stream_type: str = "text/event-stream"
    error: Any = ErrorResponse
    example: Mapping[str, Any] | None = None
    waits: bool = True
    administers: bool = False


def operation(summary: str, request: Any = None, response: Any = None, **more: Any) -> Callable[[HandlerT], HandlerT]:
    """Declares a handler's Operation. `more` are its other fields."""

    return redeclared(Operation(summary=summary, request=request, response=response, **more))


def redeclared(found: Operation) -> Callable[[HandlerT], HandlerT]:
    """Declares the Operation of another handler for one that answers the same."""

    def declare(handler: HandlerT) -> HandlerT:
        setattr(handler, _ATTRIBUTE, found)
        return handler

    return declare


def declared(route: BaseRoute) -> Operation | None:
    """What was declared of a route's handler."""
    found: Operation | None = getattr(getattr(route, "endpoint", None), _ATTRIBUTE, None)
    return found


def document(
    routes: Iterable[BaseRoute], *, root_path: str, open_paths: Set[str] | None, refuses_unknown: bool = True
) -> Schema:
    """The document of all routes with an operation. All but `open_paths` need an API key; None: there are no keys.

    `refuses_unknown` says whether bodies may only have parameters that exist.
    """
    described = [(route, found) for route in routes if isinstance(route, Route) and (found := declared(route))]
    kinds = {
        kind: [value for _, found in described if (value := getattr(found, kind)) is not None]
        for kind in ("request", "query", "response", "events", "error")
    }
    refs, components = _schemas(kinds)
    schemas = {name: [refs(kind) for kind in values] for name, values in kinds.items()}
    others = [schema for name, listed in schemas.items() if name != "request" for schema in listed]
    relax_tags(kinds["request"], schemas["request"], others, components)
    answers = reachable([schemas[name] for name in ("response", "events", "error")], components)
    for name in components.keys() - answers:
        _leave_out_unsupported(components[name])
    if not refuses_unknown:
        for request in kinds["request"]:
            components[refs(request)["$ref"].removeprefix(REF)].pop("additionalProperties", None)
    paths: Schema = {}
    for route, found in described:
        shared = _operation(route, found, refs, components)
        if open_paths is not None and route.path not in open_paths:
            shared["security"] = [{"bearerAuth": []}]
        for method in sorted((route.methods or set()) - {"HEAD"}):
            path = paths.setdefault(route.path_format, {})
            path[method.lower()] = {"operationId": _operation_id(method, route.path_format), **shared}
    for query in kinds["query"]:
        components.pop(refs(query)["$ref"].removeprefix(REF), None)
    parts: Schema = {"schemas": components}
    if open_paths is not None:
        parts["securitySchemes"] = {"bearerAuth": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidewheel",
            "version": __version__,
            "description": "Every parameter of a body may be null, which is the same as leaving it out, unless it is "
            "required.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": parts,
    }


def _schemas(kinds: Mapping[str, Sequence[Any]]) -> tuple[Callable[[Any], Schema], dict[str, Schema]]:
    types = [kind for values in kinds.values() for kind in values]
    described = msgspec.json.schema_components(types, ref_template=REF + "{name}")
    # Structs of the same name are told apart by their modules, which all lie here.
    schemas, components = orjson.loads(orjson.dumps(described).replace(b"tidewheel.server.protocol.", b""))
    by_type = list(zip(types, schemas, strict=True))

    def schema_of(wanted: Any) -> Schema:
        return next(schema for kind, schema in by_type if kind is wanted)

    for component in components.values():
        for field in component.get("properties", {}).values():
            # Absent and null are the same everywhere, so that this says nothing.
            if "default" in field and field["default"] is None:
                del field["default"]
    return schema_of, components


def _leave_out_unsupported(component: Schema) -> None:
    """Leaves out parameters that exist only to be refused by name, because readers have no use for them."""
    fields = component.get("properties", {})
    for name in [name for name, field in fields.items() if field == {"type": "null"}]:
        del fields[name]


def _operation(
    route: Route, found: Operation, refs: Callable[[Any], Schema], components: Mapping[str, Schema]
) -> Schema:
    described: Schema = {"summary": found.summary}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in route.param_convertors
    ]
    if found.query is not None:
        struct = components[refs(found.query)["$ref"].removeprefix(REF)]
        required = struct.get("required", ())
        parameters += [
            {"name": name, "in": "query", "required": name in required, "schema": field}
            for name, field in struct["properties"].items()
        ]
    if parameters:
        described["parameters"] = parameters
    if found.request is not None:
        body = {"schema": refs(found.request)}
        if found.example is not None:
            body["example"] = dict(found.example)
        described["requestBody"] = {"required": True, "content": {"application/json": body}}
    answer: Schema = {"description": "The answer"}
    if found.response is not None:
        answer["content"] = {found.media_type: {"schema": refs(found.response)}}
    if found.events is not None:
        answer["description"] = "The answer; with stream, events whose data have the second schema"
        answer["content"][found.stream_type] = {"schema": refs(found.events)}
    failures = {"default": "An error"}
    if found.request is not None:
        failures = {**_REFUSALS, **(_REFUSALS_OF_WAITING if found.waits else {}), **failures}
        if "priority" in components[refs(found.request)["$ref"].removeprefix(REF)].get("properties", {}):
            failures["403"] = _NEEDS_PRIORITY
    if found.administers:
        failures["403"] = _NEEDS_ADMINISTRATOR
    content = {"application/json": {"schema": refs(found.error)}}
    described["responses"] = {
        "200": answer,
        **{status: {"description": text, "content": content} for status, text in failures.items()},
    }
    return described


def _operation_id(method: str, path: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in path).split()
    return "_".join([method.lower(), *words])
