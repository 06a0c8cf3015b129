"""The endpoints of encoders, which a server has with a chat model and without one."""

from __future__ import annotations

from starlette.routing import Route

from .cohere import CohereEmbeddingsEndpoint
from .embeddings import EmbeddingsEndpoint
from .encoder_state import EncoderState
from .ollama_embeddings import OllamaEmbeddings
from .pooling import PoolingEndpoints
from .scoring import ScoringEndpoints
from .tei import TeiEndpoints


def encoder_routes(state: EncoderState) -> list[Route]:
    """All of them."""
    scoring = ScoringEndpoints(state)
    return [
        *EmbeddingsEndpoint(state).routes(),
        *PoolingEndpoints(state).routes(),
        *scoring.routes(),
        *CohereEmbeddingsEndpoint(state).routes(),
        *TeiEndpoints(state, scoring).routes(),
        *OllamaEmbeddings(state).routes(),
    ]
