"""The endpoints of generation on a server that has no chat model: an error that says what is served instead."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.errors import quoted

from ..encoders import endpoints_for
from ..errors import ApiError

_PATHS: Mapping[str, str] = {
    "GET": "/v1/responses/{id} /v1/responses/{id}/input_items",
    "DELETE": "/v1/responses/{id}",
    "POST": "/v1/chat/completions /v1/chat/completions/render /v1/completions /v1/completions/render /v1/responses "
    "/v1/responses/input_tokens /v1/responses/{id}/cancel /v1/messages /v1/messages/count_tokens /api/chat "
    "/api/generate /infill /completion /tokenize /detokenize /v1/load_lora_adapter /v1/unload_lora_adapter "
    "/reset_prefix_cache",
}
"""What only a chat model has, by method."""


def no_chat_routes(model: Encoder) -> list[Route]:
    """These endpoints, on a server of this model."""

    async def refuse(request: Request) -> Response:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"this server has no chat model, and {request.url.path} needs one: {quoted(model.name)} is for "
            f"{endpoints_for(model)}",
            code="no_chat_model",
        )

    return [Route(path, refuse, methods=[method]) for method, paths in _PATHS.items() for path in paths.split()]
