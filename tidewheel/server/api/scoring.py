"""`/v1/score` and `/v1/rerank`, under all the paths that clients know them by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.encoders.encoder import Encoder, ScorePlan
from tidewheel.server.api.json_response import json_response
from tidewheel.server.encoders import ServedEncoders, check_input, truncation
from tidewheel.server.prompts import PromptEncoder
from tidewheel.server.protocol.decode import BodyDecoder
from tidewheel.server.protocol.scoring import (
    RankedDocument,
    RerankList,
    RerankRequest,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
)

_SCORE_PATHS = ("/v1/score", "/score")
_RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")


class ScoringEndpoints:
    """How well texts go together. `worker` lends its threads for texts that are long."""

    def __init__(self, encoders: ServedEncoders, worker: PromptEncoder) -> None:
        self._encoders = encoders
        self._worker = worker
        self._decode_score = BodyDecoder(ScoreRequest)
        self._decode_rerank = BodyDecoder(RerankRequest)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            *(Route(path, self._score, methods=["POST"]) for path in _SCORE_PATHS),
            *(Route(path, self._rerank, methods=["POST"]) for path in _RERANK_PATHS),
        ]

    async def _score(self, request: Request) -> Response:
        raw = await request.body()
        body = self._decode_score(raw)
        model = self._encoders.scorer(body.model)
        queries, documents = body.texts()
        names = (_names("text_1", body.text_1), _names("text_2", body.text_2))
        plan = await self._worker.run(
            len(raw), lambda: _plan(model, queries, documents, names, body.truncate_prompt_tokens)
        )
        answer = await self._encoders.run(request, "score", model, plan.inputs)
        scores = enumerate(plan.scores(answer.rows).tolist())
        return json_response(
            ScoreList(
                id=answer.id,
                created=answer.created,
                model=model.name,
                data=[Score(index=i, score=score) for i, score in scores],
                usage=answer.usage,
            )
        )

    async def _rerank(self, request: Request) -> Response:
        raw = await request.body()
        body = self._decode_rerank(raw)
        model = self._encoders.scorer(body.model)
        documents, limit = body.texts(), body.limit()
        names = (["query"], [f"documents[{i}]" for i in range(len(documents))])
        plan = await self._worker.run(
            len(raw), lambda: _plan(model, [body.query], documents, names, body.truncate_prompt_tokens)
        )
        answer = await self._encoders.run(request, "rerank", model, plan.inputs)
        scores = plan.scores(answer.rows)
        results = [RerankResult(index=i, relevance_score=float(scores[i])) for i in _best(scores, limit)]
        if body.return_documents is not False:
            for result in results:
                result.document = RankedDocument(documents[result.index])
        return json_response(RerankList(id=answer.id, model=model.name, usage=answer.usage, results=results))


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


def _best(scores: NDArray[np.float64], limit: int) -> list[int]:
    """The places of the highest scores; equal ones stay in order."""
    places: list[int] = np.argsort(-scores, kind="stable")[:limit].tolist()
    return places
