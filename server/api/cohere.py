"""Cohere's `/v2/embed`, and `/v1/embed` of its older clients. Its rerank is beside the others, in scoring.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.encoders.embedder import Embedder
from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.encoders.pooling import Floats

from ..chat.field_names import renamed_fields
from ..encoders import EncoderAnswer
from ..errors import bad_request
from ..openapi.document import operation
from ..protocol.cohere import (
    CohereEmbedAnswer,
    CohereEmbeddings,
    CohereEmbedRequest,
    CohereMeta,
    CohereType,
    CohereUnits,
    CohereVersion,
)
from ..protocol.decode import BodyDecoder
from .body import whole_body
from .embeddings import embed
from .encoder_state import EncoderState
from .encoder_texts import EncoderTexts, in_base64, numbers
from .json_response import json_response

# Names that models give the prompt for a type, beside the type's own.
_PROMPTS = {"search_query": ("query",), "search_document": ("document", "passage", "corpus")}
_NAMES = {"input": "texts", "dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}


class CohereEmbeddingsEndpoint:
    """Vectors of texts in Cohere's shapes."""

    def __init__(self, state: EncoderState) -> None:
        self._texts = EncoderTexts(state)
        self._decode = BodyDecoder(CohereEmbedRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [Route("/v2/embed", self._embed, methods=["POST"]), Route("/v1/embed", self._embed_v1, methods=["POST"])]

    @operation(
        "Texts to vectors, in Cohere's shapes",
        CohereEmbedRequest,
        CohereEmbedAnswer,
        example={"texts": ["high tide", "low tide"], "input_type": "search_document", "embedding_types": ["float"]},
    )
    async def _embed(self, request: Request) -> Response:
        return await self._answered(request, "2")

    @operation(
        "Texts to vectors, in Cohere's older shapes",
        CohereEmbedRequest,
        CohereEmbedAnswer,
        example={"texts": ["high tide", "low tide"], "input_type": "search_document"},
    )
    async def _embed_v1(self, request: Request) -> Response:
        return await self._answered(request, "1")

    async def _answered(self, request: Request, version: str) -> Response:
        raw = await whole_body(request)
        body = self._decode(raw)
        wanted = body.wanted()
        chosen = self._texts.encoders.doing("embed", body.model)
        wanted.prompt_name = _prompt_name(chosen, body.input_type)
        if (body.max_tokens or 0) > chosen.max_length:
            wanted.truncate_prompt_tokens = -1
        asked: list[CohereType] = body.embedding_types or (["float"] if version == "2" else [])
        types = [*dict.fromkeys(asked)]
        width = body.output_dimension or int(chosen.info["width"])
        if width % 8 and {"binary", "ubinary"} & {*types}:
            raise bad_request(
                f"embedding_types: bits need a number of dimensions that 8 divides, and the vectors have {width}",
                "embedding_types",
            )
        with renamed_fields(_NAMES):
            model, answer = await embed(request, self._texts, wanted, len(raw), cut_by="truncate: END")
        return await self._texts.response(answer, lambda: _response(model, body, types, version, answer))


def _prompt_name(model: Encoder, input_type: str | None) -> str | None:
    """The name of the model's prompt for a type; None for its default."""
    if input_type is None or not isinstance(model, Embedder):
        return None
    return next((name for name in (input_type, *_PROMPTS.get(input_type, ())) if name in model.prompts), None)


def _response(
    model: Encoder, body: CohereEmbedRequest, types: Sequence[CohereType], version: str, answer: EncoderAnswer
) -> Response:
    vectors = model.finished("embed", answer.results, dimensions=body.output_dimension)
    by_type = CohereEmbeddings()
    for kind in types:
        if kind == "float":
            by_type.floats = [numbers(vector) for vector in vectors]
        elif kind == "base64":
            by_type.base64 = [in_base64(vector) for vector in vectors]
        else:
            setattr(by_type, kind, [_WHOLE[kind](vector).tolist() for vector in vectors])
    return json_response(
        CohereEmbedAnswer(
            id=answer.id,
            response_type="embeddings_by_type" if types else "embeddings_floats",
            embeddings=by_type if types else [numbers(vector) for vector in vectors],
            texts=body.texts,
            meta=CohereMeta(CohereVersion(version), CohereUnits(answer.usage.prompt_tokens)),
        )
    )


def _scaled(vector: Floats) -> NDArray[np.int16]:
    """Whole numbers from -127 to 127, whose cosines are those of the vectors. The scale is the vector's own, so that
    its bytes depend on nothing else.
    """
    largest = np.abs(vector).max(initial=0)
    scaled: NDArray[np.int16] = np.rint(vector * np.float32(127 / largest if largest > 0 else 0)).astype(np.int16)
    return scaled


def _bits(vector: Floats) -> NDArray[np.int16]:
    """Eight numbers in each byte, as sentence-transformers packs them."""
    return np.packbits(vector > 0).astype(np.int16)


_WHOLE: Mapping[CohereType, Callable[[Floats], NDArray[np.int16]]] = {
    "int8": _scaled,
    "uint8": lambda vector: _scaled(vector) + 128,
    "binary": lambda vector: _bits(vector) - 128,
    "ubinary": _bits,
}
