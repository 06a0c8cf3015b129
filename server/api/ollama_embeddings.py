"""Ollama's `/api/embed` and `/api/embeddings`."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..chat.field_names import renamed_fields
from ..ollama.names import tagged, untagged
from ..ollama.times import nanoseconds
from ..openapi.document import operation
from ..protocol.decode import BodyDecoder
from ..protocol.embeddings import EmbeddingRequest
from ..protocol.ollama import OllamaBody, OllamaEmbeddingsRequest, OllamaEmbedRequest
from ..protocol.ollama_answers import OllamaEmbedAnswer, OllamaEmbeddingsAnswer, OllamaError
from .body import whole_body
from .embeddings import embed
from .encoder_state import EncoderState
from .encoder_texts import EncoderTexts, numbers
from .json_response import json_response


class OllamaEmbeddings:
    """Vectors of texts in Ollama's shapes. Long texts and answers are handled in the prompt encoder's threads."""

    def __init__(self, state: EncoderState) -> None:
        self._models = state.models
        self._texts = EncoderTexts(state)
        self._decode_embed = BodyDecoder(OllamaEmbedRequest, notes=state.notes)
        self._decode_embeddings = BodyDecoder(OllamaEmbeddingsRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/api/embed", self._embed, methods=["POST"]),
            Route("/api/embeddings", self._embeddings, methods=["POST"]),
        ]

    @operation(
        "Texts to vectors of length 1, in Ollama's shapes",
        OllamaEmbedRequest,
        OllamaEmbedAnswer,
        error=OllamaError,
        example={"input": ["high tide", "low tide"]},
    )
    async def _embed(self, request: Request) -> Response:
        started = time.perf_counter()
        raw = await whole_body(request)
        body = self._decode_embed(raw)
        wanted = self._wanted(body, body.input, cuts=body.truncate is not False)
        wanted.dimensions, wanted.normalize = body.dimensions, True
        model, answer = await embed(request, self._texts, wanted, len(raw), cut_by="truncate: true")

        def made() -> Response:
            vectors = model.finished("embed", answer.results, dimensions=body.dimensions, use_activation=True)
            took = nanoseconds(time.perf_counter() - started)
            listed = [numbers(vector) for vector in vectors]
            tokens = answer.usage.prompt_tokens
            return json_response(OllamaEmbedAnswer(body.model or tagged(model.name), listed, took, 1, tokens))

        return await self._texts.response(answer, made)

    @operation(
        "A text to a vector, in Ollama's older shapes",
        OllamaEmbeddingsRequest,
        OllamaEmbeddingsAnswer,
        error=OllamaError,
        example={"prompt": "high tide"},
    )
    async def _embeddings(self, request: Request) -> Response:
        raw = await whole_body(request)
        body = self._decode_embeddings(raw)
        wanted = self._wanted(body, body.prompt, cuts=True)
        with renamed_fields({"input": "prompt"}):
            model, answer = await embed(request, self._texts, wanted, len(raw))
        return json_response(OllamaEmbeddingsAnswer(numbers(model.finished("embed", answer.results)[0])))

    def _wanted(self, body: OllamaBody, texts: str | list[str], *, cuts: bool) -> EmbeddingRequest:
        given: list[str | int | list[int]] | str = texts if isinstance(texts, str) else [*texts]
        model = untagged(body.model, [card.id for card in self._models.cards])
        return EmbeddingRequest(model=model, input=given, truncate_prompt_tokens=-1 if cuts else None)
