"""`/v1/embeddings`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.encoders.encoder import Encoder

from ..encoders import EncoderAnswer
from ..openapi.document import operation
from ..protocol.decode import BodyDecoder
from ..protocol.embeddings import Embedding, EmbeddingList, EmbeddingRequest
from .body import whole_body
from .encoder_state import EncoderState
from .encoder_texts import EncoderTexts, in_base64, numbers
from .json_response import json_response


class EmbeddingsEndpoint:
    """Vectors of texts."""

    def __init__(self, state: EncoderState) -> None:
        self._texts = EncoderTexts(state)
        self._decode = BodyDecoder(EmbeddingRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoint."""
        return [Route("/v1/embeddings", self._create, methods=["POST"])]

    @operation("Texts to vectors", EmbeddingRequest, EmbeddingList, example={"input": ["high tide", "low tide"]})
    async def _create(self, request: Request) -> Response:
        raw = await whole_body(request)
        body = self._decode(raw)
        model, answer = await embed(request, self._texts, body, len(raw))
        return await self._texts.response(answer, lambda: _response(model, body, answer))


async def embed(
    request: Request,
    texts: EncoderTexts,
    body: EmbeddingRequest,
    raw_size: int,
    *,
    cut_by: str = "truncate_prompt_tokens: -1",
) -> tuple[Encoder, EncoderAnswer]:
    """The model that a body asks for, and its results of the body's inputs. Raises ApiError or InvalidRequestError."""
    model = texts.encoders.doing("embed", body.model)
    model.check_task("embed", dimensions=body.dimensions, use_activation=body.activation())
    return model, await texts.run(request, "embd", model, "embed", body, raw_size, cut_by=cut_by)


def _response(model: Encoder, body: EmbeddingRequest, answer: EncoderAnswer) -> Response:
    vectors = model.finished("embed", answer.results, dimensions=body.dimensions, use_activation=body.activation())
    write = in_base64 if body.encoding_format == "base64" else numbers
    data = [Embedding(index=i, embedding=write(vector)) for i, vector in enumerate(vectors)]
    return json_response(
        EmbeddingList(id=answer.id, created=answer.created, model=model.name, data=data, usage=answer.usage)
    )
