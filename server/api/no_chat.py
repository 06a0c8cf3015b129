"""The endpoints of generation on a server that has no chat model: an error that says what is served instead."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.encoders.tasks import Task
from tidewheel.engine.errors import quoted

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


_USES: Mapping[Task, str] = {"embed": "/v1/embeddings, /v1/score or /v1/rerank", "classify": "/v1/classify"}


def no_chat_routes(model: Encoder) -> list[Route]:
    """These endpoints, on a server of this model."""
    use = "/v1/score or /v1/rerank" if model.is_cross_encoder else _USES.get(model.task, "/v1/pooling")

    async def refuse(request: Request) -> Response:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"this server has no chat model, and {request.url.path} needs one: {quoted(model.name)} is for {use}",
            code="no_chat_model",
        )

    return [Route(path, refuse, methods=[method]) for method, paths in _PATHS.items() for path in paths.split()]
