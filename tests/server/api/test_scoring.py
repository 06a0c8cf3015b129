"""`/v1/score` and `/v1/rerank` over real sockets, by cross-encoders and by cosines."""

from __future__ import annotations

from typing import Any

import encoder_zoo as zoo
import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.conftest import RunningServer, StartServer

from tidewheel.engine.encoders.load import load_encoders

SCORE_PATHS = ["/v1/score", "/score"]
RERANK_PATHS = ["/v1/rerank", "/rerank", "/v2/rerank"]
QUERY = "what turns the wheel"
DOCUMENTS = ["the tide turns a wheel", "corn", "", "rain and rain", "über naïve Köln"]
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    models = {"embed": "bert-prompts", "rank": "bert-cross", "logits": "roberta-cross"}
    encoders = load_encoders([str(zoo.folder(name)) for name in models.values()], list(models))
    return start_server(encoders=encoders)


def sigmoid(values: Any) -> Any:
    return 1 / (1 + np.exp(-values))


def cosines(queries: list[str], documents: list[str]) -> Any:
    first = zoo.reference("bert-prompts", queries, prompt=zoo.PROMPTS["query"])
    second = zoo.reference("bert-prompts", documents, prompt=zoo.PROMPTS["passage"])
    return (first * second).sum(1)


def expected(model: str, queries: list[str], documents: list[str]) -> Any:
    if model == "embed":
        return cosines(queries, documents)
    pairs = list(zip(queries * (len(documents) if len(queries) == 1 else 1), documents, strict=True))
    logits = zoo.reference("bert-cross" if model == "rank" else "roberta-cross", pairs)[:, 0]
    return sigmoid(logits) if model == "rank" else logits


def scores(response: httpx.Response) -> list[float]:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    assert {item["object"] for item in data} == {"score"}
    return [item["score"] for item in data]


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("model", ["embed", "rank", "logits"])
@pytest.mark.parametrize("path", SCORE_PATHS)
def test_scores_of_one_with_one_one_with_many_and_many_with_many(server: RunningServer, path: str, model: str) -> None:
    one = {"model": model, "text_1": QUERY, "text_2": DOCUMENTS[0]}
    np.testing.assert_allclose(scores(server.post(path, one)), expected(model, [QUERY], DOCUMENTS[:1]), **TOLERANCE)
    for first in (QUERY, [QUERY]):
        many = {"model": model, "text_1": first, "text_2": DOCUMENTS}
        np.testing.assert_allclose(scores(server.post(path, many)), expected(model, [QUERY], DOCUMENTS), **TOLERANCE)
    pairs = {"model": model, "text_1": DOCUMENTS[::-1], "text_2": DOCUMENTS}
    np.testing.assert_allclose(
        scores(server.post(path, pairs)), expected(model, DOCUMENTS[::-1], DOCUMENTS), **TOLERANCE
    )


@pytest.mark.parametrize("model", ["embed", "rank", "logits"])
@pytest.mark.parametrize("path", RERANK_PATHS)
def test_the_most_relevant_document_comes_first(server: RunningServer, path: str, model: str) -> None:
    body = {"model": model, "query": QUERY, "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]}
    answer = server.post(path, body).json()
    wanted = expected(model, [QUERY], DOCUMENTS)
    order = [result["index"] for result in answer["results"]]
    assert order == np.argsort(-wanted).tolist()
    got = [result["relevance_score"] for result in answer["results"]]
    np.testing.assert_allclose(got, wanted[order], **TOLERANCE)
    assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[i] for i in order]
    top = server.post(path, {**body, "top_n": 2, "return_documents": False}).json()["results"]
    assert [result["index"] for result in top] == order[:2]
    assert all("document" not in result for result in top)


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_the_sides_have_other_names_too(server: RunningServer, names: tuple[str, str]) -> None:
    body = {"model": "rank", names[0]: QUERY, names[1]: DOCUMENTS}
    np.testing.assert_allclose(
        scores(server.post("/v1/score", body)), expected("rank", [QUERY], DOCUMENTS), **TOLERANCE
    )
    error = refusal(server.post("/v1/score", {**body, names[1]: ["a " * 200]}))
    assert (error["param"], error["code"]) == (f"{names[1]}[0]", "context_length_exceeded")


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank"])
def test_logits_are_given_where_they_are_asked_for(server: RunningServer, path: str) -> None:
    sides = {"queries": QUERY, "documents": DOCUMENTS} if "score" in path else {"query": QUERY, "documents": DOCUMENTS}
    answer = server.post(path, {"model": "rank", "use_activation": False, **sides}).json()
    found = answer.get("data") or sorted(answer["results"], key=lambda result: result["index"])
    logits = zoo.reference("bert-cross", [(QUERY, document) for document in DOCUMENTS])[:, 0]
    np.testing.assert_allclose([one.get("score", one.get("relevance_score")) for one in found], logits, **TOLERANCE)


def test_documents_are_cut_to_max_tokens_per_doc(server: RunningServer) -> None:
    documents = ["the tide turns a wheel", "corn", " ".join(zoo.WORDS * 10)]
    body = {"model": "rank", "query": QUERY, "documents": documents, "max_tokens_per_doc": 2}
    answer = server.post("/v2/rerank", body).json()
    cut = ["the tide", "corn", " ".join((zoo.WORDS * 10)[:2])]
    wanted = expected("rank", [QUERY], cut)
    for result in answer["results"]:
        np.testing.assert_allclose(result["relevance_score"], wanted[result["index"]], **TOLERANCE)
        assert result["document"]["text"] == documents[result["index"]]
    many = server.post("/v2/rerank", {**body, "max_tokens_per_doc": 4096})
    assert many.status_code == 200, "cut to what the model takes"


def test_teis_rerank_is_told_by_its_texts(server: RunningServer) -> None:
    body = {"model": "logits", "query": QUERY, "texts": DOCUMENTS}
    logits = expected("logits", [QUERY], DOCUMENTS)
    for more, wanted in (({"raw_scores": True}, logits), ({}, sigmoid(logits))):
        ranks = server.post("/rerank", {**body, **more}).json()
        assert [rank["index"] for rank in ranks] == np.argsort(-logits).tolist()
        np.testing.assert_allclose([rank["score"] for rank in ranks], sorted(wanted, reverse=True), **TOLERANCE)
        assert "text" not in ranks[0]
    ranks = server.post("/rerank", {**body, "return_text": True, "truncate": True}).json()
    assert ranks[0]["text"] == DOCUMENTS[ranks[0]["index"]]
    error = refusal(server.post("/rerank", {**body, "texts": ["a", "a " * 200]}))
    assert error["param"] == "texts[1]"
    assert "truncate: true" in error["message"]


def test_usage_counts_what_the_model_read(server: RunningServer) -> None:
    pair = len(zoo.tokenizer("bert-cross")([QUERY], [DOCUMENTS[0]])["input_ids"][0])
    body = {"text_1": QUERY, "text_2": DOCUMENTS[0]}
    assert server.post("/v1/score", {**body, "model": "rank"}).json()["usage"] == {
        "prompt_tokens": pair,
        "total_tokens": pair,
    }


def test_the_cross_encoder_is_the_default(server: RunningServer) -> None:
    answer = server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()
    assert answer["model"] == "rank"


def test_equal_documents_stay_in_order(server: RunningServer) -> None:
    answer = server.post("/v1/rerank", {"model": "embed", "query": QUERY, "documents": ["corn"] * 5}).json()
    assert [result["index"] for result in answer["results"]] == [0, 1, 2, 3, 4]


def test_long_texts_are_refused_or_cut(server: RunningServer) -> None:
    text = " ".join(zoo.WORDS * 10)
    body = {"model": "rank", "query": QUERY, "documents": ["corn", text]}
    error = refusal(server.post("/v1/rerank", body))
    assert (error["param"], error["code"]) == ("documents[1]", "context_length_exceeded")
    answer = server.post("/v1/rerank", {**body, "truncate_prompt_tokens": -1}).json()
    wanted = sigmoid(zoo.reference("bert-cross", [(QUERY, "corn"), (QUERY, text)], max_length=96)[:, 0])
    for result in answer["results"]:
        np.testing.assert_allclose(result["relevance_score"], wanted[result["index"]], **TOLERANCE)
    error = refusal(server.post("/v1/score", {"model": "embed", "text_1": text, "text_2": "corn"}))
    assert error["param"] == "text_1"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/score", {"text_1": []}, "text_1"),
        ("/v1/score", {"text_2": []}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"]}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": 1}, "text_1"),
        ("/v1/score", {"softmax": False}, "softmax"),
        ("/v1/score", {"queries": "a"}, "queries"),
        ("/v1/score", {"text_1": None}, "text_1"),
        ("/v1/score", {"text_1": None, "text_2": None}, "queries"),
        ("/v1/score", {"text_2": None, "documents": "a"}, "documents"),
        ("/v1/score", {"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/v1/rerank", {"documents": []}, "documents"),
        ("/v1/rerank", {"documents": ["a"] * 2049}, "documents"),
        ("/v1/rerank", {"documents": [{}]}, "documents[0].text"),
        ("/v1/rerank", {"documents": [{"text": "a", "image": "b"}]}, "documents[0].image"),
        ("/v1/rerank", {"documents": "a"}, "documents"),
        ("/v1/rerank", {"query": ["a"]}, "query"),
        ("/v1/rerank", {"top_n": -1}, "top_n"),
        ("/v1/rerank", {"max_chunks_per_doc": 2}, "max_chunks_per_doc"),
        ("/v1/rerank", {"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/rerank", {"documents": None, "texts": []}, "texts"),
    ],
)
def test_errors_name_the_field(server: RunningServer, path: str, fields: dict[str, Any], param: str) -> None:
    good: dict[str, Any] = {"text_1": "a", "text_2": "b"} if "score" in path else {"query": "a", "documents": ["b"]}
    error = refusal(server.post(path, {**good, **fields}))
    assert error["param"] == param
    assert param.partition("[")[0] in error["message"]


SIDE = st.text(max_size=20) | st.lists(st.text(max_size=20) | st.sampled_from(zoo.WORDS), max_size=4)


@settings(deadline=None, max_examples=30)
@given(SIDE, SIDE, st.sampled_from(["embed", "rank"]))
def test_any_texts_give_scores_or_say_what_is_wrong(server: RunningServer, first: Any, second: Any, model: str) -> None:
    response = server.post("/v1/score", {"model": model, "text_1": first, "text_2": second})
    counts = [1 if isinstance(side, str) else len(side) for side in (first, second)]
    if counts[1] and counts[0] in (1, counts[1]):
        got = scores(response)
        assert len(got) == counts[1]
        assert all(-1 <= score <= 1 for score in got)
    else:
        assert refusal(response)["param"] in ("text_1", "text_2")
