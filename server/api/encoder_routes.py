"""The endpoints of encoders, which a server has with a chat model and without one."""

from __future__ import annotations

from starlette.routing import Route

from .embeddings import EmbeddingsEndpoint
from .encoder_state import EncoderState
from .ollama_embeddings import OllamaEmbeddings
from .scoring import ScoringEndpoints


def encoder_routes(state: EncoderState) -> list[Route]:
    """All of them."""
    return [
        *EmbeddingsEndpoint(state).routes(),
        *ScoringEndpoints(state).routes(),
        *OllamaEmbeddings(state).routes(),
    ]
