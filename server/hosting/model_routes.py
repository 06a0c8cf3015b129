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

_ENDPOINTS: Sequence[Any] = (
    ChatEndpoint,
    ResponsesEndpoints,
    MessagesEndpoints,
    CompletionsEndpoint,
    OllamaEndpoints,
    AdapterEndpoints,
    RenderEndpoints,
    InfillEndpoint,
    TokenizeEndpoints,
    EmbeddingsEndpoint,
    PoolingEndpoints,
    ScoringEndpoints,
    CohereEmbeddingsEndpoint,
    TeiEndpoints,
    OllamaEmbeddings,
)
_OPERATIONS = ("/reset_prefix_cache",)


def model_routes(answer: Handler, *, shows_tokenizer: bool) -> list[Route]:
    """All of them, answered by one handler. What a model does not have it refuses."""
    # Routes name their handlers and need nothing of what these will work with.
    routes: list[Route] = [route for kind in _ENDPOINTS for route in kind.routes(object.__new__(kind))]
    nothing = cast(Any, None)
    routes += [route for route in operations_routes(nothing, "", 0, nothing, {}) if route.path in _OPERATIONS]
    if shows_tokenizer:
        routes.append(Route("/tokenizer_info", answer))
    return [Route(route.path, _described(answer, route), methods=sorted(route.methods or ())) for route in routes]


def _described(answer: Handler, route: Route) -> Handler:
    """A handler of its own for a route, with what was declared of it."""

    async def handler(request: Request) -> Response:
        return await answer(request)

    return handler if (found := declared(route)) is None else redeclared(found)(handler)
