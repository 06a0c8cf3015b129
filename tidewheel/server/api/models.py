"""`/v1/models`: which names are served, and the check that a request asks for one of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.server.api.json_response import json_response
from tidewheel.server.errors import ApiError
from tidewheel.server.protocol.models import ModelCard, ModelList


class ServedModels:
    """The names that one model is served under; the first one names it in answers to requests that name none."""

    def __init__(self, names: Sequence[str], root: str, max_model_len: int) -> None:
        created = int(time.time())
        self._cards = {
            name: ModelCard(id=name, created=created, root=root, max_model_len=max_model_len) for name in names
        }
        self.default = names[0]

    def resolve(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError (404) for a model that is not served."""
        if name is None:
            return self.default
        return self._card(name).id

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [Route("/v1/models", self._list), Route("/v1/models/{name:path}", self._retrieve)]

    def _card(self, name: str) -> ModelCard:
        try:
            return self._cards[name]
        except KeyError:
            served = ", ".join(self._cards)
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"the model {name!r} is not served here; served: {served}",
                param="model",
                code="model_not_found",
            ) from None

    async def _list(self, request: Request) -> Response:
        return json_response(ModelList(data=list(self._cards.values())))

    async def _retrieve(self, request: Request) -> Response:
        return json_response(self._card(request.path_params["name"]))
