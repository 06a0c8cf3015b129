"""What servers of several models have to load and unload them, on a server of one model, which stays loaded."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import bad_request
from ..openapi.document import operation
from .json_response import json_response


class IsSleeping(msgspec.Struct):
    """Whether no model is loaded."""

    is_sleeping: bool


def one_model_routes() -> list[Route]:
    """The endpoints, of vLLM and llama.cpp."""
    return [
        Route("/is_sleeping", _is_sleeping),
        *(Route(path, _refuse, methods=["POST"]) for path in ("/sleep", "/wake_up", "/models/load", "/models/unload")),
    ]


@operation("Whether no model is loaded: never, on a server of one model", response=IsSleeping)
async def _is_sleeping(request: Request) -> Response:
    return json_response(IsSleeping(is_sleeping=False))


@operation("Refused: a server of one model keeps it loaded")
async def _refuse(request: Request) -> Response:
    raise bad_request(
        f"{request.url.path} is for servers of several models; this one has one model, which stays loaded: start it "
        "with --model NAME=MODEL to have models that are loaded and unloaded",
        code="unsupported_endpoint",
    )
