"""The endpoints that a model answers, without a model: their paths, and what the documents say of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..api.adapters import AdapterEndpoints
from ..api.chat import ChatEndpoint
from ..api.cohere import CohereEmbeddingsEndpoint
from ..api.completions import CompletionsEndpoint
from ..api.embeddings import EmbeddingsEndpoint
from ..api.infill import InfillEndpoint
from ..api.messages import MessagesEndpoints
from ..api.ollama import OllamaEndpoints
from ..api.ollama_embeddings import OllamaEmbeddings
from ..api.operations import operations_routes
from ..api.pooling import PoolingEndpoints
from ..api.render import RenderEndpoints
from ..api.responses import ResponsesEndpoints
from ..api.scoring import ScoringEndpoints
from ..api.tei import TeiEndpoints
from ..api.tokenize import TokenizeEndpoints
from ..openapi.document import declared, redeclared

Handler = Callable[[Request], Awaitable[Response]]

_CHAT: Sequence[Any] = (
    ChatEndpoint,
    ResponsesEndpoints,
    MessagesEndpoints,
    CompletionsEndpoint,
    OllamaEndpoints,
    AdapterEndpoints,
    RenderEndpoints,
    InfillEndpoint,
    TokenizeEndpoints,
)
_ENCODERS: Sequence[Any] = (
    EmbeddingsEndpoint,
    PoolingEndpoints,
    ScoringEndpoints,
    CohereEmbeddingsEndpoint,
    TeiEndpoints,
    OllamaEmbeddings,
)
_OPERATIONS = ("/reset_prefix_cache",)


def model_routes(answer: Handler, answer_of_encoder: Handler, *, shows_tokenizer: bool) -> list[Route]:
    """All of them, answered by two handlers. What a model does not have it refuses."""
    nothing = cast(Any, None)
    others = [route for route in operations_routes(nothing, "", 0, nothing, {}) if route.path in _OPERATIONS]
    if shows_tokenizer:
        others.append(Route("/tokenizer_info", answer))
    return [
        Route(route.path, _described(handler, route), methods=sorted(route.methods or ()))
        for handler, routes in ((answer, [*_routes(_CHAT), *others]), (answer_of_encoder, _routes(_ENCODERS)))
        for route in routes
    ]


def _routes(kinds: Sequence[Any]) -> list[Route]:
    """The routes name their handlers, and need nothing of what these will work with."""
    return [route for kind in kinds for route in kind.routes(object.__new__(kind))]


def _described(answer: Handler, route: Route) -> Handler:
    """A handler of its own for a route, with what was declared of it."""

    async def handler(request: Request) -> Response:
        return await answer(request)

    return handler if (found := declared(route)) is None else redeclared(found)(handler)
