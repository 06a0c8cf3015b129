"""`/v1/score` and `/v1/rerank`, under all the paths that clients know them by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.encoders.classification import activated
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
from ..protocol.tei import TeiRank, TeiRerankRequest
from .body import whole_body
from .encoder_state import EncoderState
from .json_response import json_response

_SCORE_PATHS = ("/v1/score", "/score")
_RERANK_PATHS = ("/v1/rerank", "/v2/rerank")
_BY_TRUNCATE = "truncate: true"
_TO_RERANK = {"query": "When is high tide?", "documents": ["At noon.", "It is a boat."]}


class ScoringEndpoints:
    """Scores how well texts match. Long texts are handled in the prompt encoder's threads."""

    def __init__(self, state: EncoderState) -> None:
        self._encoders = state.encoders
        self._worker = state.encoder
        self._decode_score = BodyDecoder(ScoreRequest, notes=state.notes)
        self._decode_rerank = BodyDecoder(RerankRequest, notes=state.notes)
        self._decode_tei = BodyDecoder(TeiRerankRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            *(Route(path, self._score, methods=["POST"]) for path in _SCORE_PATHS),
            *(Route(path, self._rerank, methods=["POST"]) for path in _RERANK_PATHS),
            Route("/rerank", self._rerank_as_asked, methods=["POST"]),
        ]

    @operation(
        "Score how well texts go together",
        ScoreRequest,
        ScoreList,
        example={"queries": "When is high tide?", "documents": ["At noon.", "It is a boat."]},
    )
    async def _score(self, request: Request) -> Response:
        raw = await whole_body(request)
        body = self._decode_score(raw)
        model = self._encoders.scorer(body.model)
        queries, documents, names = body.texts()
        limit = truncation(model, body.truncate_prompt_tokens)

        def planned() -> ScorePlan:
            plan = model.plan_scores(queries, documents, truncate_to=limit, use_activation=body.use_activation)
            return checked(model, plan, names)

        # A cross-encoder reads a single query once with each document.
        plan = await self._worker.run(len(raw) * len(documents), planned)
        answer = await self._encoders.run(request, "score", model, plan.task, plan.inputs, [*queries, *documents])
        return await self._worker.run(answer.nbytes, lambda: _scores(model, plan, answer))

    @operation("Put documents in the order of a query", RerankRequest, RerankList, example=_TO_RERANK)
    async def _rerank(self, request: Request) -> Response:
        return await self._ranked(request, await whole_body(request))

    @operation(
        "Put documents in the order of a query; with `texts` in place of `documents`, as TEI does",
        RerankRequest,
        RerankList,
        example=_TO_RERANK,
    )
    async def _rerank_as_asked(self, request: Request) -> Response:
        raw = await whole_body(request)
        try:
            is_teis = msgspec.json.decode(raw, type=_Shape).texts is not msgspec.UNSET
        except (msgspec.DecodeError, RecursionError):
            is_teis = False  # the decoder says what is wrong
        return await (self.ranked_as_tei(request, raw) if is_teis else self._ranked(request, raw))

    async def _ranked(self, request: Request, raw: bytearray) -> Response:
        body = self._decode_rerank(raw)
        model = self._encoders.scorer(body.model)
        documents, top = body.texts(), body.limit()
        most, cut = body.cut()
        limit = truncation(model, cut)

        def planned() -> ScorePlan:
            read = documents
            if most is not None:
                kept = min(most, model.max_length + 1)  # what is longer is refused as before
                read = [model.tokenizer.cut(text, kept) for text in documents]
            plan = model.plan_scores([body.query], read, truncate_to=limit, use_activation=body.use_activation)
            return checked(model, plan, _places("documents", documents))

        plan = await self._worker.run(len(raw) * len(documents), planned)
        answer = await self._encoders.run(request, "rerank", model, plan.task, plan.inputs, [body.query, *documents])
        shown = None if body.return_documents is False else documents
        return await self._worker.run(answer.nbytes, lambda: _ranking(model, plan, answer, top, shown))

    async def ranked_as_tei(self, request: Request, raw: bytearray) -> Response:
        """The answer to a body in TEI's shape."""
        body = self._decode_tei(raw)
        model = self._encoders.scorer(body.model)
        texts, limit = body.limited(), truncation(model, body.cut())

        def planned() -> ScorePlan:
            plan = model.plan_scores([body.query], texts, truncate_to=limit, use_activation=False)
            return checked(model, plan, _places("texts", texts), _BY_TRUNCATE)

        def ranked() -> Response:
            scores: NDArray[np.floating[Any]] = plan.scores(answer.results)
            if model.is_cross_encoder and not body.raw_scores:
                scores = activated(scores, "sigmoid")
            ranks = [
                TeiRank(index=i, score=float(scores[i]), text=texts[i] if body.return_text else msgspec.UNSET)
                for i in _best(scores)
            ]
            return json_response(ranks)

        plan = await self._worker.run(len(raw) * len(texts), planned)
        answer = await self._encoders.run(request, "rerank", model, plan.task, plan.inputs, [body.query, *texts])
        return await self._worker.run(answer.nbytes, ranked)


class _Shape(msgspec.Struct):
    texts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def checked(
    model: Encoder,
    plan: ScorePlan,
    names: tuple[Sequence[str], Sequence[str]],
    cut_by: str = "truncate_prompt_tokens: -1",
) -> ScorePlan:
    """The plan. Raises what `check_input` raises, with the `names` of the texts on either side."""
    for item, (side, i) in zip(plan.inputs, plan.sources, strict=True):
        check_input(model, item, names[side][i], cut_by)
    return plan


def _places(param: str, texts: Sequence[str]) -> tuple[list[str], list[str]]:
    return ["query"], [f"{param}[{i}]" for i in range(len(texts))]


def _best(scores: NDArray[np.floating[Any]]) -> list[int]:
    best: list[int] = np.argsort(-scores, kind="stable").tolist()  # stable: equal ones stay in order
    return best


def _scores(model: Encoder, plan: ScorePlan, answer: EncoderAnswer) -> Response:
    data = [Score(index=i, score=score) for i, score in enumerate(plan.scores(answer.results).tolist())]
    return json_response(
        ScoreList(id=answer.id, created=answer.created, model=model.name, data=data, usage=answer.usage)
    )


def _ranking(
    model: Encoder, plan: ScorePlan, answer: EncoderAnswer, top: int, documents: Sequence[str] | None
) -> Response:
    scores = plan.scores(answer.results)
    results = [
        RerankResult(
            index=i,
            document=msgspec.UNSET if documents is None else RankedDocument(documents[i]),
            relevance_score=float(scores[i]),
        )
        for i in _best(scores)[:top]
    ]
    return json_response(RerankList(id=answer.id, model=model.name, usage=answer.usage, results=results))
