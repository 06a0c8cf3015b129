"""`/v1/models`: the names that are served."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..model_cards import ModelCards
from ..openapi.document import operation
from ..protocol.models import ModelCard, ModelList
from .json_response import json_response


def models_routes(models: ModelCards) -> list[Route]:
    """The endpoints that list the models."""

    @operation("List the served models", response=ModelList)
    async def list_models(request: Request) -> Response:
        await models.refresh()
        return json_response(ModelList(data=models.cards))

    @operation("One served model", response=ModelCard)
    async def retrieve_model(request: Request) -> Response:
        await models.refresh()
        return json_response(models.card(request.path_params["name"]))

    return [Route("/v1/models", list_models), Route("/v1/models/{name:path}", retrieve_model)]
