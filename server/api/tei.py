"""Text Embeddings Inference's `/`, `/embed`, `/embed_all`, `/embed_sparse`, `/predict`, `/similarity` and `/info`.

Its `/rerank` is beside the others, in scoring.py.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel import __version__
from tidewheel.engine.encoders.batching import MAX_BATCH_TOKENS
from tidewheel.engine.encoders.classification import ClassActivation, activated
from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.encoders.pooling import Floats, cosines
from tidewheel.engine.encoders.tasks import Task
from tidewheel.engine.encoders.tokenization import EncoderInput

from ..chat.field_names import renamed_fields
from ..encoders import check_input, truncation
from ..openapi.document import operation
from ..protocol.decode import BodyDecoder
from ..protocol.embeddings import MAX_INPUTS, TextsRequest
from ..protocol.scoring import limited
from ..protocol.tei import (
    TeiEmbedRequest,
    TeiInfo,
    TeiInfoQuery,
    TeiLabels,
    TeiModelType,
    TeiPooling,
    TeiPrediction,
    TeiPredictRequest,
    TeiRootRequest,
    TeiSimilarityOptions,
    TeiSimilarityRequest,
    TeiSparseValue,
    TeiTexts,
)
from .body import whole_body
from .encoder_state import EncoderState
from .encoder_texts import EncoderTexts, numbers
from .json_response import json_response
from .scoring import ScoringEndpoints

_CUT_BY = "truncate: true"
_POOLING = {"lasttoken": "last_token", "": "token"}  # TEI's names; ColBERT gives a vector for each token


class TeiEndpoints:
    """Without a `model`, which TEI does not have, the first model answers that can."""

    def __init__(self, state: EncoderState, scoring: ScoringEndpoints) -> None:
        self._scoring = scoring
        self._texts = EncoderTexts(state)
        self._worker, self._models = state.encoder, state.models
        self._decode_embed = BodyDecoder(TeiEmbedRequest, notes=state.notes)
        self._decode_texts = BodyDecoder(TeiTexts, notes=state.notes)
        self._decode_predict = BodyDecoder(TeiPredictRequest, notes=state.notes)
        self._decode_similarity = BodyDecoder(TeiSimilarityRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/", self._root, methods=["POST"]),
            Route("/embed", self._embed, methods=["POST"]),
            Route("/embed_all", self._embed_all, methods=["POST"]),
            Route("/embed_sparse", self._embed_sparse, methods=["POST"]),
            Route("/predict", self._predict, methods=["POST"]),
            Route("/similarity", self._similarity, methods=["POST"]),
            Route("/info", self._info, methods=["GET"]),
        ]

    @operation(
        "What /rerank, /similarity, /predict or /embed answers, by the body and the model, as at TEI's root",
        TeiRootRequest,
        list[Any],
        example={"inputs": ["high tide", "low tide"]},
    )
    async def _root(self, request: Request) -> Response:
        raw = await whole_body(request)
        try:
            given = msgspec.json.decode(raw, type=_Given)
        except (msgspec.DecodeError, RecursionError):
            given = _Given()  # the endpoint says what is wrong
        if given.texts is not msgspec.UNSET:
            return await self._scoring.ranked_as_tei(request, raw)
        if bytes(given.inputs or b"")[:1] == b"{":
            return await self._compared(request, raw)
        classifies = self._texts.encoders.any(given.model).task == "classify"
        return await (self._predicted(request, raw) if classifies else self._embedded(request, raw))

    @operation(
        "Texts to vectors, in TEI's shapes",
        TeiEmbedRequest,
        list[list[float]],
        example={"inputs": ["high tide", "low tide"]},
    )
    async def _embed(self, request: Request) -> Response:
        return await self._embedded(request, await whole_body(request))

    async def _embedded(self, request: Request, raw: bytearray) -> Response:
        body = self._decode_embed(raw)
        return await self._vectors(
            request, "embed", body, len(raw), dimensions=body.dimensions, use_activation=body.normalize is not False
        )

    @operation(
        "Texts to a vector for each token, in TEI's shapes",
        TeiTexts,
        list[list[list[float]]],
        example={"inputs": ["high tide", "low tide"]},
    )
    async def _embed_all(self, request: Request) -> Response:
        raw = await whole_body(request)
        return await self._vectors(request, "token_embed", self._decode_texts(raw), len(raw), use_activation=False)

    @operation("A model and its limits, in TEI's shapes", query=TeiInfoQuery, response=TeiInfo)
    async def _info(self, request: Request) -> Response:
        encoders = self._texts.encoders
        model = encoders.any(request.query_params.get("model"))
        return json_response(
            TeiInfo(
                model_id=self._models.card(model.name).root,
                served_model_name=model.name,
                model_dtype=model.info.get("dtype", "float32"),
                model_type=_model_type(model),
                max_concurrent_requests=encoders.max_queue,
                max_input_length=model.max_length,
                max_batch_tokens=MAX_BATCH_TOKENS,
                max_client_batch_size=MAX_INPUTS,
                auto_truncate=False,
                tokenization_workers=self._worker.num_threads,
                version=__version__,
            )
        )

    async def _vectors(
        self,
        request: Request,
        task: Task,
        body: TeiTexts,
        raw_size: int,
        *,
        dimensions: int | None = None,
        use_activation: bool,
    ) -> Response:
        model = self._texts.encoders.doing(task, body.model)
        model.check_task(task, dimensions=dimensions, use_activation=use_activation)
        with renamed_fields({"input": "inputs"}):
            answer = await self._texts.run(request, "embd", model, task, body.texts(), raw_size, cut_by=_CUT_BY)

        def written() -> Response:
            found = model.finished(task, answer.results, dimensions=dimensions, use_activation=use_activation)
            return json_response([numbers(values) for values in found])

        return await self._texts.response(answer, written)

    @operation(
        "Texts to weights of tokens, in TEI's shapes",
        TeiTexts,
        list[list[TeiSparseValue]],
        example={"inputs": ["high tide", "low tide"]},
    )
    async def _embed_sparse(self, request: Request) -> Response:
        raw = await whole_body(request)
        body = self._decode_texts(raw)
        model = self._texts.encoders.doing("sparse", body.model)
        with renamed_fields({"input": "inputs"}):
            answer = await self._texts.run(request, "embd", model, "sparse", body.texts(), len(raw), cut_by=_CUT_BY)

        def written() -> Response:
            found = model.finished("sparse", answer.results)
            return json_response([[TeiSparseValue(int(i), value) for i, value in rows.tolist()] for rows in found])

        return await self._texts.response(answer, written)

    @operation(
        "The labels of texts, the most probable first, in TEI's shapes",
        TeiPredictRequest,
        list[TeiPrediction | list[TeiPrediction]],
        example={"inputs": "high tide"},
    )
    async def _predict(self, request: Request) -> Response:
        return await self._predicted(request, await whole_body(request))

    async def _predicted(self, request: Request, raw: bytearray) -> Response:
        body = self._decode_predict(raw)
        model = self._texts.encoders.doing("classify", body.model)
        sequences, is_list = body.sequences()
        limit = truncation(model, body.cut())

        def encoded() -> list[EncoderInput]:
            inputs = []
            for i, (text, *pair) in enumerate(sequences):
                inputs.append(
                    model.encode_pair(text, pair[0], truncate_to=limit)
                    if pair
                    else model.encode(text, truncate_to=limit)
                )
                check_input(model, inputs[-1], f"inputs[{i}]" if is_list else "inputs", _CUT_BY)
            return inputs

        inputs = await self._worker.run(len(raw) * len(sequences), encoded)
        given = [text for texts in sequences for text in texts]
        answer = await self._texts.encoders.run(request, "predict", model, "classify", inputs, given)

        def written() -> Response:
            found = [_predictions(model, logits, raw_scores=body.raw_scores is True) for logits in answer.results]
            return json_response(found if is_list else found[0])

        return await self._texts.response(answer, written)

    @operation(
        "The cosines of a text and others, in TEI's shapes",
        TeiSimilarityRequest,
        list[float],
        example={"inputs": {"source_sentence": "high tide", "sentences": ["low tide", "a boat"]}},
    )
    async def _similarity(self, request: Request) -> Response:
        return await self._compared(request, await whole_body(request))

    async def _compared(self, request: Request, raw: bytearray) -> Response:
        body = self._decode_similarity(raw)
        model = self._texts.encoders.doing("embed", body.model)
        options = body.parameters or TeiSimilarityOptions()
        sentences = limited(body.inputs.sentences, "inputs.sentences", MAX_INPUTS - 1)  # the other is the source
        texts = TextsRequest(
            input=[body.inputs.source_sentence, *sentences],
            prompt_name=options.prompt_name,
            truncate_prompt_tokens=options.cut(),
        )
        names = {"prompt_name": "parameters.prompt_name", "input[0]": "inputs.source_sentence"}
        names |= {f"input[{i}]": f"inputs.sentences[{i - 1}]" for i in range(1, len(sentences) + 1)}
        with renamed_fields(names):
            answer = await self._texts.run(request, "embd", model, "embed", texts, len(raw), cut_by=_CUT_BY)

        def written() -> Response:
            rows = np.stack(answer.results)
            return json_response(cosines(rows[:1], rows[1:]).tolist())

        return await self._texts.response(answer, written)


def _model_type(model: Encoder) -> TeiModelType:
    if not model.labels:
        pooling = "splade" if model.task == "sparse" else " ".join(model.pooling)
        return TeiModelType(embedding=TeiPooling(_POOLING.get(pooling, pooling)))
    numbered = [*enumerate(model.labels)]
    labels = TeiLabels({str(i): label for i, label in numbered}, {label: i for i, label in numbered})
    return TeiModelType(reranker=labels) if model.is_cross_encoder else TeiModelType(classifier=labels)


class _Given(msgspec.Struct):
    inputs: msgspec.Raw = msgspec.Raw()
    texts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    model: str | None = None


def _predictions(model: Encoder, logits: Floats, *, raw_scores: bool) -> list[TeiPrediction]:
    default: ClassActivation = "sigmoid" if len(model.labels) == 1 else "softmax"
    scores = logits if raw_scores else activated(logits, model.activation or default)
    order = np.argsort(-scores, kind="stable").tolist()
    return [TeiPrediction(float(scores[i]), model.labels[i]) for i in order]
