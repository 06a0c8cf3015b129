"""`/v1/pooling` and `/v1/classify`, as in vLLM."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.encoders.tasks import Task

from ..encoders import EncoderAnswer
from ..openapi.document import operation
from ..protocol.decode import BodyDecoder
from ..protocol.pooling import (
    ClassificationList,
    ClassificationRequest,
    Classified,
    Pooled,
    PoolingList,
    PoolingRequest,
)
from .body import whole_body
from .encoder_state import EncoderState
from .encoder_texts import EncoderTexts, in_base64, numbers
from .json_response import json_response


class PoolingEndpoints:
    """All that encoders make of texts, and the labels of texts."""

    def __init__(self, state: EncoderState) -> None:
        self._texts = EncoderTexts(state)
        self._decode_pooling = BodyDecoder(PoolingRequest, notes=state.notes)
        self._decode_classification = BodyDecoder(ClassificationRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/v1/pooling", self._pool, methods=["POST"]),
            Route("/v1/classify", self._classify, methods=["POST"]),
        ]

    @operation(
        "Texts to vectors, vectors of tokens, probabilities of labels, or weights of tokens",
        PoolingRequest,
        PoolingList,
        example={"input": ["high tide", "low tide"], "task": "token_embed"},
    )
    async def _pool(self, request: Request) -> Response:
        raw = await whole_body(request)
        body = self._decode_pooling(raw)
        encoders = self._texts.encoders
        model = encoders.any(body.model) if body.task is None else encoders.doing(body.task, body.model)
        task: Task = body.task or model.task
        model.check_task(task, dimensions=body.dimensions, use_activation=body.activation())
        answer = await self._texts.run(request, "pool", model, task, body, len(raw))
        return await self._texts.response(answer, lambda: _pooled(model, task, body, answer))

    @operation(
        "The labels of texts, and how probable they are",
        ClassificationRequest,
        ClassificationList,
        example={"input": ["high tide", "low tide"]},
    )
    async def _classify(self, request: Request) -> Response:
        raw = await whole_body(request)
        body = self._decode_classification(raw)
        model = self._texts.encoders.doing("classify", body.model)
        answer = await self._texts.run(request, "classify", model, "classify", body, len(raw))
        return await self._texts.response(answer, lambda: _classified(model, body, answer))


def _pooled(model: Encoder, task: Task, body: PoolingRequest, answer: EncoderAnswer) -> Response:
    found = model.finished(task, answer.results, dimensions=body.dimensions, use_activation=body.activation())
    write = in_base64 if body.encoding_format == "base64" else numbers
    data = [Pooled(index=i, data=write(values)) for i, values in enumerate(found)]
    return json_response(
        PoolingList(id=answer.id, created=answer.created, model=model.name, data=data, usage=answer.usage)
    )


def _classified(model: Encoder, body: ClassificationRequest, answer: EncoderAnswer) -> Response:
    data = [
        Classified(index=i, label=model.labels[probs.argmax()], probs=numbers(probs), num_classes=len(probs))
        for i, probs in enumerate(model.finished("classify", answer.results, use_activation=body.use_activation))
    ]
    return json_response(
        ClassificationList(id=answer.id, created=answer.created, model=model.name, data=data, usage=answer.usage)
    )
