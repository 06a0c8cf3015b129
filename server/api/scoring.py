"""`/v1/score` and `/v1/rerank`, under all the paths that clients know them by."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.encoders.encoder import Encoder, ScorePlan

from ..encoders import EncoderAnswer, check_input, truncation
from ..openapi.document import operation
from ..protocol.decode import BodyDecoder
from ..protocol.scoring import (
    RankedDocument,
    RerankList,
    RerankRequest,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
)
from .body import whole_body
from .encoder_state import EncoderState
from .json_response import json_response

_SCORE_PATHS = ("/v1/score", "/score")
_RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")


class ScoringEndpoints:
    """Scores how well texts match. Long texts are handled in the prompt encoder's threads."""

    def __init__(self, state: EncoderState) -> None:
        self._encoders = state.encoders
        self._worker = state.encoder
        self._decode_score = BodyDecoder(ScoreRequest, notes=state.notes)
        self._decode_rerank = BodyDecoder(RerankRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            *(Route(path, self._score, methods=["POST"]) for path in _SCORE_PATHS),
            *(Route(path, self._rerank, methods=["POST"]) for path in _RERANK_PATHS),
        ]

    @operation(
        "Score how well texts go together",
        ScoreRequest,
        ScoreList,
        example={"text_1": "When is high tide?", "text_2": ["At noon.", "It is a boat."]},
    )
    async def _score(self, request: Request) -> Response:
        raw = await whole_body(request)
        body = self._decode_score(raw)
        model = self._encoders.scorer(body.model)
        queries, documents = body.texts()
        names = (_names("text_1", body.text_1), _names("text_2", body.text_2))
        limit = body.truncate_prompt_tokens
        # A cross-encoder reads a single query once with each document.
        plan = await self._worker.run(len(raw) * len(documents), lambda: _plan(model, queries, documents, names, limit))
        answer = await self._encoders.run(request, "score", model, plan.task, plan.inputs, [*queries, *documents])
        return await self._worker.run(answer.nbytes, lambda: _scores(model, plan, answer))

    @operation(
        "Put documents in the order of a query",
        RerankRequest,
        RerankList,
        example={"query": "When is high tide?", "documents": ["At noon.", "It is a boat."]},
    )
    async def _rerank(self, request: Request) -> Response:
        raw = await whole_body(request)
        body = self._decode_rerank(raw)
        model = self._encoders.scorer(body.model)
        documents, top = body.texts(), body.limit()
        names = (["query"], [f"documents[{i}]" for i in range(len(documents))])
        limit = body.truncate_prompt_tokens
        plan = await self._worker.run(
            len(raw) * len(documents), lambda: _plan(model, [body.query], documents, names, limit)
        )
        answer = await self._encoders.run(request, "rerank", model, plan.task, plan.inputs, [body.query, *documents])
        shown = None if body.return_documents is False else documents
        return await self._worker.run(answer.nbytes, lambda: _ranking(model, plan, answer, top, shown))


def _plan(
    model: Encoder,
    queries: Sequence[str],
    documents: Sequence[str],
    names: tuple[Sequence[str], Sequence[str]],
    truncate_prompt_tokens: int | None,
) -> ScorePlan:
    plan = model.plan_scores(queries, documents, truncate_to=truncation(model, truncate_prompt_tokens))
    for item, (side, i) in zip(plan.inputs, plan.sources, strict=True):
        check_input(model, item, names[side][i])
    return plan


def _names(param: str, given: str | list[str]) -> list[str]:
    return [param] if isinstance(given, str) else [f"{param}[{i}]" for i in range(len(given))]


def _scores(model: Encoder, plan: ScorePlan, answer: EncoderAnswer) -> Response:
    data = [Score(index=i, score=score) for i, score in enumerate(plan.scores(answer.results).tolist())]
    return json_response(
        ScoreList(id=answer.id, created=answer.created, model=model.name, data=data, usage=answer.usage)
    )


def _ranking(
    model: Encoder, plan: ScorePlan, answer: EncoderAnswer, top: int, documents: Sequence[str] | None
) -> Response:
    scores = plan.scores(answer.results)
    best = np.argsort(-scores, kind="stable")[:top].tolist()  # stable: equal ones stay in order
    results = [
        RerankResult(
            index=i,
            document=msgspec.UNSET if documents is None else RankedDocument(documents[i]),
            relevance_score=float(scores[i]),
        )
        for i in best
    ]
    return json_response(RerankList(id=answer.id, model=model.name, usage=answer.usage, results=results))
