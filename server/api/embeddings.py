"""`/v1/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.encoders.encoder import Embedder
from tidewheel.engine.encoders.tokenization import EncoderInput

from ..encoders import EncoderAnswer, ServedEncoders, check_input, truncation
from ..openapi.document import operation
from ..protocol.decode import BodyDecoder
from ..protocol.embeddings import Embedding, EmbeddingList, EmbeddingRequest
from ..text_threads import TextThreads
from .body import whole_body
from .encoder_state import EncoderState
from .json_response import json_response


class EmbeddingsEndpoint:
    """Vectors of texts. Long texts and answers are handled in the prompt encoder's threads."""

    def __init__(self, state: EncoderState) -> None:
        self._encoders = state.encoders
        self._worker = state.encoder
        self._decode = BodyDecoder(EmbeddingRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoint."""
        return [Route("/v1/embeddings", self._create, methods=["POST"])]

    @operation("Texts to vectors", EmbeddingRequest, EmbeddingList, example={"input": ["high tide", "low tide"]})
    async def _create(self, request: Request) -> Response:
        raw = await whole_body(request)
        body = self._decode(raw)
        model, answer = await embed(request, self._encoders, self._worker, body, len(raw))
        return await self._worker.run(answer.nbytes, lambda: _response(model, body, answer))


async def embed(
    request: Request, encoders: ServedEncoders, worker: TextThreads, body: EmbeddingRequest, raw_size: int
) -> tuple[Embedder, EncoderAnswer]:
    """The model that a body asks for, and its results of the body's inputs. Raises ApiError or InvalidRequestError."""
    model = encoders.embedder(body.model)
    model.check_task("embed", dimensions=body.dimensions, use_activation=body.normalize)
    given = body.inputs()
    # Multiplied by their number, because short texts cost time too.
    inputs = await worker.run(raw_size * len(given), lambda: _inputs(model, body, given))
    return model, await encoders.run(request, "embd", model, "embed", inputs, given)


def _inputs(model: Embedder, body: EmbeddingRequest, given: Sequence[str | list[int]]) -> list[EncoderInput]:
    truncate_to = truncation(model, body.truncate_prompt_tokens)
    inputs: list[EncoderInput] = []
    for i, item in enumerate(given):
        if isinstance(item, str):
            encoded = model.encode(
                item,
                prompt_name=body.prompt_name,
                add_special_tokens=body.add_special_tokens is not False,
                truncate_to=truncate_to,
            )
        else:
            encoded = EncoderInput(item[:truncate_to])
        check_input(model, encoded, "input" if len(given) == 1 else f"input[{i}]")
        inputs.append(encoded)
    return inputs


def _response(model: Embedder, body: EmbeddingRequest, answer: EncoderAnswer) -> Response:
    vectors = model.vectors(answer.results, dimensions=body.dimensions, normalize=body.normalize)
    write = _base64 if body.encoding_format == "base64" else numbers
    data = [Embedding(index=i, embedding=write(vector)) for i, vector in enumerate(vectors)]
    return json_response(
        EmbeddingList(id=answer.id, created=answer.created, model=model.name, data=data, usage=answer.usage)
    )


def numbers(vector: NDArray[np.float32]) -> list[float]:
    """A vector as JSON, to be a part of an answer."""
    # orjson writes the shortest digits that give the same float32, in a fraction of the time that a list would take.
    text = orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)
    return cast("list[float]", msgspec.Raw(text))


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
