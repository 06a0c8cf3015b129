"""What encoders give in the shapes of vLLM, Text Embeddings Inference and Cohere, over real sockets."""

from __future__ import annotations

import base64
import json
from typing import Any

import encoder_zoo as zoo
import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.api.test_long_inputs import heard
from server.conftest import RunningServer, StartServer

from tidewheel.engine.encoders.load import load_encoders
from tidewheel.server.api.encoder_texts import numbers

pytest.importorskip("tidewheel._native")

TEXTS = ["the tide turns a wheel", "corn", "rain and rain"]
LONG = " ".join(zoo.WORDS * 20)
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
LABELS = ["calm", "rough", "stormy"]


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    models = {"embed": "bert", "prompted": "bert-prompts", "classes": "bert-classes", "rank": "bert-cross"}
    folders = [str(zoo.native_folder(name)) for name in models.values()]
    return start_server(encoders=load_encoders(folders, list(models)))


def answered(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def softmax(logits: Any) -> Any:
    return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)


def raw(texts: list[str]) -> Any:
    """The vectors of `bert` before they are normalized."""
    import torch

    with torch.no_grad():
        fields = [zoo.tokenizer("bert")(text, return_tensors="pt") for text in texts]
        return [zoo.model("bert")(**one)[0][0].numpy() for one in fields]


@pytest.mark.parametrize("path", ["/v1/pooling", "/pooling"])
def test_pooling_gives_what_the_model_is_for_or_a_task(server: RunningServer, path: str) -> None:
    body = {"model": "embed", "input": TEXTS}
    data = answered(server.post(path, body))["data"]
    assert [(one["index"], one["object"]) for one in data] == [(i, "pooling") for i in range(3)]
    np.testing.assert_allclose([one["data"] for one in data], zoo.reference("bert", TEXTS), **TOLERANCE)
    tokens = answered(server.post(path, {**body, "task": "token_embed", "use_activation": False}))["data"]
    for one, wanted in zip(tokens, raw(TEXTS), strict=True):
        np.testing.assert_allclose(one["data"], wanted, **TOLERANCE)
    cut = {**body, "task": "token_embed", "encoding_format": "base64", "dimensions": 8}
    text = answered(server.post(path, cut))["data"][0]["data"]
    rows = np.frombuffer(base64.b64decode(text), "<f4").reshape(-1, 8)
    wanted = raw(TEXTS)[0][:, :8]
    np.testing.assert_allclose(rows, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), **TOLERANCE)
    probs = answered(server.post(path, {"model": "classes", "input": TEXTS}))["data"]
    np.testing.assert_allclose(
        [one["data"] for one in probs], softmax(zoo.reference("bert-classes", TEXTS)), **TOLERANCE
    )


def test_labels_and_their_probabilities(server: RunningServer) -> None:
    logits = zoo.reference("bert-classes", TEXTS)
    answer = answered(server.post("/v1/classify", {"model": "classes", "input": TEXTS}))
    assert answer["object"] == "list"
    assert [one["label"] for one in answer["data"]] == [LABELS[i] for i in logits.argmax(axis=1)]
    assert {one["num_classes"] for one in answer["data"]} == {3}
    np.testing.assert_allclose([one["probs"] for one in answer["data"]], softmax(logits), **TOLERANCE)
    ids = [zoo.tokenizer("bert-classes")(text)["input_ids"] for text in TEXTS]
    told = answered(server.post("/classify", {"model": "classes", "input": ids, "use_activation": False}))["data"]
    np.testing.assert_allclose([one["probs"] for one in told], logits, **TOLERANCE)


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (
            "/v1/pooling",
            {"model": "embed", "input": "a", "task": "classify"},
            "model",
            "does not do classify, but embed",
        ),
        ("/v1/pooling", {"model": "rank", "input": "a", "dimensions": 3}, "dimensions", "gives none"),
        ("/v1/pooling", {"input": "a", "task": "reward"}, "task", "token_embed"),
        ("/v1/pooling", {"input": "a", "encoding_format": "bytes"}, "encoding_format", "base64, float"),
        ("/v1/pooling", {"messages": [], "input": "a"}, "messages", "input"),
        (
            "/v1/pooling",
            {"model": "embed", "input": "a", "normalize": True, "use_activation": False},
            "normalize",
            "one",
        ),
        ("/v1/classify", {"model": "embed", "input": "a"}, "model", "use it with /v1/embeddings or /v1/pooling"),
        ("/v1/classify", {"model": "classes", "input": LONG}, "input", "truncate_prompt_tokens"),
        ("/v1/classify", {"model": "classes", "input": "a", "prompt_name": "query"}, "prompt_name", "no prompts"),
        ("/v1/score", {"model": "classes", "queries": "a", "documents": "b"}, "model", "3 labels"),
        ("/embed", {"inputs": [LONG]}, "inputs", "send truncate: true"),
        ("/embed", {"inputs": ["a", LONG]}, "inputs[1]", "send truncate: true"),
        ("/embed", {"inputs": []}, "inputs", "empty"),
        ("/embed", {"inputs": ["a"] * 2049}, "inputs", "2048"),
        ("/embed", {"inputs": "a", "truncation_direction": "Left"}, "truncation_direction", "Right"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, "prompt_name", "none"),
        ("/embed_all", {"inputs": [[10**9]]}, "inputs", "between 0"),
        ("/predict", {"inputs": ["a", "b", "c"]}, "inputs", "one or two"),
        ("/predict", {"inputs": [["a"], "b"]}, "inputs", "mixes"),
        ("/predict", {"inputs": [["a"], []]}, "inputs[1]", "0 texts"),
        ("/predict", {"inputs": [["a"], ["b", LONG]]}, "inputs[1]", "truncate: true"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences", "empty"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["b", LONG]}},
            "inputs.sentences[1]",
            "truncate",
        ),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"] * 2048}}, "inputs.sentences", "2047"),
        ("/v2/embed", {"texts": []}, "texts", "empty"),
        ("/v2/embed", {"texts": ["a", LONG], "truncate": "NONE"}, "texts[1]", "truncate: END"),
        ("/v2/embed", {"texts": ["a"], "truncate": "START"}, "truncate", "END, NONE"),
        ("/v2/embed", {"texts": ["a"], "truncate": "NONE", "max_tokens": 3}, "max_tokens", "NONE"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types[0]", "base64, binary, float"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["ubinary"], "output_dimension": 9}, "embedding_types", "8"),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 99}, "output_dimension", "between 1 and 32"),
        ("/v2/embed", {"texts": ["a"], "images": ["data:"]}, "images", "not supported"),
    ],
)
def test_errors_name_the_field(server: RunningServer, path: str, body: dict[str, Any], param: str, said: str) -> None:
    error = refusal(server.post(path, body))
    assert error["param"] == param
    assert said in error["message"]


def test_an_answer_of_too_many_numbers_is_refused_before_it_is_computed(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidewheel.engine.encoders.encoder.MAX_RESULT_BYTES", 4 * 32 * 100)
    body = {"model": "embed", "task": "token_embed", "input": [[5] * 64]}
    answered(server.post("/v1/pooling", body))
    error = refusal(server.post("/v1/pooling", {**body, "input": [[5] * 64] * 2}))
    assert "send fewer or shorter texts" in error["message"]


def test_tei_embeds(server: RunningServer) -> None:
    wanted = zoo.reference("bert", TEXTS)
    np.testing.assert_allclose(answered(server.post("/embed", {"inputs": TEXTS})), wanted, **TOLERANCE)
    np.testing.assert_allclose(answered(server.post("/embed", {"inputs": TEXTS[0]})), wanted[:1], **TOLERANCE)
    means = [tokens.mean(axis=0) for tokens in raw(TEXTS)]
    told = {"inputs": TEXTS, "normalize": False}
    np.testing.assert_allclose(answered(server.post("/embed", told)), means, **TOLERANCE)
    for found, tokens in zip(answered(server.post("/embed_all", {"inputs": TEXTS})), raw(TEXTS), strict=True):
        np.testing.assert_allclose(found, tokens, **TOLERANCE)
    prompted = {"model": "prompted", "inputs": "corn", "prompt_name": "query", "truncate": True, "dimensions": 32}
    query = zoo.reference("bert-prompts", ["corn"], prompt=zoo.PROMPTS["query"])
    np.testing.assert_allclose(answered(server.post("/embed", prompted)), query, **TOLERANCE)
    cut = answered(server.post("/embed", {"inputs": LONG, "truncate": True}))
    np.testing.assert_allclose(cut, zoo.reference("bert", [LONG], max_length=64), **TOLERANCE)


def test_a_classifier_of_several_labels_scores_no_pairs(start_server: StartServer) -> None:
    folders = [str(zoo.native_folder(name)) for name in ("bert-classes", "bert")]
    pairs = {"queries": "tide", "documents": ["tide", "corn"]}
    both = start_server(encoders=load_encoders(folders, ["classes", "embed"]), chat=False)
    answer = answered(both.post("/v1/score", pairs))
    assert (answer["model"], answer["data"][0]["score"]) == ("embed", pytest.approx(1))
    assert answered(both.post("/v1/rerank", {"query": "tide", "documents": ["tide"]}))["model"] == "embed"
    alone = start_server(encoders=load_encoders(folders[:1], ["classes"]), chat=False)
    assert alone.post("/v1/score", pairs).status_code == 404


def test_sparse_vectors(start_server: StartServer, server: RunningServer) -> None:
    response = server.post("/embed_sparse", {"inputs": "corn"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    encoders = load_encoders([str(zoo.native_folder("bert-splade"))], ["words"])
    (encoder,) = encoders.encoders.values()
    wanted = encoder.run("sparse", [encoder.encode(text) for text in TEXTS])
    sparse = start_server(encoders=encoders)
    found = answered(sparse.post("/embed_sparse", {"inputs": TEXTS}))
    for values, rows in zip(found, wanted, strict=True):
        assert [(one["index"], np.float32(one["value"])) for one in values] == [(int(i), w) for i, w in rows]
    data = answered(sparse.post("/v1/pooling", {"input": TEXTS}))["data"]
    np.testing.assert_array_equal(np.array(data[0]["data"], np.float32), wanted[0])
    best = answered(sparse.post("/v1/rerank", {"query": TEXTS[1], "documents": TEXTS}))["results"][0]
    assert best["relevance_score"] >= float((wanted[1][:, 1] ** 2).sum()) * 0.999
    assert refusal(sparse.post("/embed", {"inputs": "corn", "model": "words"}))["param"] == "model"


def test_tei_predicts_one_text_a_pair_or_many(server: RunningServer) -> None:
    body = {"model": "classes", "inputs": TEXTS[0]}
    (logits,) = zoo.reference("bert-classes", TEXTS[:1])
    order = np.argsort(-logits)
    predictions = answered(server.post("/predict", body))
    assert [one["label"] for one in predictions] == [LABELS[i] for i in order]
    np.testing.assert_allclose([one["score"] for one in predictions], softmax(logits)[order], **TOLERANCE)
    bare = answered(server.post("/predict", {**body, "raw_scores": True}))
    np.testing.assert_allclose([one["score"] for one in bare], logits[order], **TOLERANCE)
    (pair,) = zoo.reference("bert-cross", [(TEXTS[0], TEXTS[1])])
    for inputs in (TEXTS[:2], [TEXTS[:2]]):
        found = answered(server.post("/predict", {"model": "rank", "inputs": inputs, "truncate": True}))
        (one,) = found[0] if inputs != TEXTS[:2] else found
        np.testing.assert_allclose(one["score"], 1 / (1 + np.exp(-pair[0])), **TOLERANCE)
    both = answered(server.post("/predict", {"model": "classes", "inputs": [[TEXTS[0]], [TEXTS[0], TEXTS[1]]]}))
    assert both[0] == predictions
    assert both[1] != predictions


@pytest.mark.parametrize("version", ["1", "2"])
def test_cohere_embeds(server: RunningServer, version: str) -> None:
    body = {"model": "prompted", "texts": TEXTS, "input_type": "search_document", "truncate": "END"}
    answer = answered(server.post(f"/v{version}/embed", body))
    wanted = zoo.reference("bert-prompts", TEXTS, prompt=zoo.PROMPTS["passage"])
    vectors = answer["embeddings"] if version == "1" else answer["embeddings"]["float"]
    np.testing.assert_allclose(vectors, wanted, **TOLERANCE)
    assert answer["texts"] == TEXTS
    assert answer["meta"]["api_version"]["version"] == version
    assert answer["meta"]["billed_units"]["input_tokens"] > 0
    typed = {**body, "input_type": "search_query", "embedding_types": ["int8", "uint8", "binary", "ubinary", "base64"]}
    found = answered(server.post(f"/v{version}/embed", typed))["embeddings"]
    queries = zoo.reference("bert-prompts", TEXTS, prompt=zoo.PROMPTS["query"])
    assert set(found) == {"int8", "uint8", "binary", "ubinary", "base64"}
    whole = np.array(found["int8"])
    assert np.abs(whole).max(axis=1).tolist() == [127] * len(TEXTS)
    scales = np.abs(queries).max(axis=1, keepdims=True) / 127
    np.testing.assert_allclose(whole * scales, queries, atol=0.51 * float(scales.max()))
    np.testing.assert_array_equal(np.array(found["uint8"]) - 128, whole)
    np.testing.assert_array_equal(found["ubinary"], np.packbits(queries > 0, axis=1))
    np.testing.assert_array_equal(np.array(found["binary"]) + 128, found["ubinary"])
    floats = np.frombuffer(base64.b64decode(found["base64"][0]), "<f4")
    np.testing.assert_allclose(floats, queries[0], **TOLERANCE)
    # A model without prompts takes the types, too, as clients always send one.
    plain = {"model": "embed", "texts": [LONG], "input_type": "classification", "max_tokens": 4096}
    plain |= {"output_dimension": 8, "embedding_types": ["float"]}
    (cut,) = answered(server.post(f"/v{version}/embed", plain))["embeddings"]["float"]
    (whole,) = zoo.reference("bert", [LONG], max_length=64)
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), **TOLERANCE)


def test_a_type_is_written_once(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr("tidewheel.server.api.cohere.numbers", lambda vector: written.append(1) or numbers(vector))
    body = {"model": "embed", "texts": TEXTS, "embedding_types": ["float"] * 100}
    assert set(answered(server.post("/v2/embed", body))["embeddings"]) == {"float"}
    assert len(written) == len(TEXTS)


def test_the_hugging_face_client(server: RunningServer) -> None:
    from huggingface_hub import InferenceClient

    vectors = InferenceClient(f"{server.url}/embed").feature_extraction(TEXTS, normalize=True)  # type: ignore[arg-type]
    np.testing.assert_allclose(vectors, zoo.reference("bert", TEXTS), **TOLERANCE)
    near = InferenceClient(f"{server.url}/similarity").sentence_similarity(TEXTS[0], TEXTS)
    wanted = zoo.reference("bert", TEXTS)
    np.testing.assert_allclose(near, wanted @ wanted[0], **TOLERANCE)


def test_the_info_of_tei(server: RunningServer) -> None:
    first = answered(server.http.get("/info"))
    assert (first["model_id"], first["model_type"]) == ("embed", {"embedding": {"pooling": "mean"}})
    assert (first["max_input_length"], first["max_client_batch_size"]) == (64, 2048)
    assert server.http.get("/info", params={"model": "none"}).status_code == 404
    kinds = {name: answered(server.http.get(f"/info?model={name}"))["model_type"] for name in ("rank", "classes")}
    assert kinds["rank"]["reranker"]["label2id"] == {"LABEL_0": 0}
    assert kinds["classes"]["classifier"]["id2label"] == {str(i): label for i, label in enumerate(LABELS)}


def test_the_root_answers_by_body_and_model(server: RunningServer) -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(server.url)
    wanted = zoo.reference("bert", TEXTS)
    np.testing.assert_allclose(client.feature_extraction(TEXTS[0]), wanted[:1], **TOLERANCE)
    np.testing.assert_allclose(client.sentence_similarity(TEXTS[0], TEXTS), wanted @ wanted[0], **TOLERANCE)
    for path, body in (
        ("/predict", {"inputs": [["corn"]], "model": "classes"}),
        ("/predict", {"inputs": "corn", "model": "rank"}),
        ("/rerank", {"query": "corn", "texts": TEXTS}),
        ("/embed", {"inputs": [[5, 6]], "normalize": False, "model": "prompted"}),
    ):
        assert answered(server.post("/", body)) == answered(server.post(path, body))
    assert refusal(server.post("/", {"inputs": []}))["param"] == "inputs"
    assert refusal(server.post("/", {}))["param"] == "inputs"
    assert server.http.get("/").headers["content-type"].startswith("text/html")


def test_the_root_needs_a_key_for_more_than_its_page(start_server: StartServer) -> None:
    locked = start_server(api_keys=["secret"], encoders=load_encoders([str(zoo.native_folder("bert"))], ["embed"]))
    assert locked.http.get("/").status_code == 200
    assert locked.post("/", {"inputs": "a"}).status_code == 401
    assert locked.post("/", {"inputs": "a"}, headers={"x-api-key": "secret"}).status_code == 200
    told = locked.http.get("/openapi.json").json()["paths"]
    assert told["/"]["post"]["security"] == told["/embed"]["post"]["security"]


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 200) | st.floats() | st.text(max_size=20) | st.sampled_from(zoo.WORDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=8,
)
FIELDS = {
    "/v1/pooling": "input",
    "/v1/classify": "input",
    "/": "inputs",
    "/embed": "inputs",
    "/embed_all": "inputs",
    "/predict": "inputs",
    "/similarity": "inputs",
    "/v2/embed": "texts",
    "/rerank": "texts",
}


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(FIELDS)), ANY)
def test_any_input_is_answered_or_refused(server: RunningServer, path: str, value: Any) -> None:
    body = {FIELDS[path]: value} | ({"query": "a"} if path == "/rerank" else {})
    response = server.http.post(path, content=json.dumps(body, allow_nan=True).encode())
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["message"]


def test_far_too_long_texts_keep_nobody_waiting(server: RunningServer) -> None:
    text = "the tide " * 1_000_000
    with heard(server.url):
        for path, body in (
            ("/v1/classify", {"input": text}),
            ("/embed", {"inputs": [text]}),
            ("/predict", {"inputs": [["a", text]]}),
            ("/rerank", {"query": "a", "texts": [text]}),
            ("/v2/embed", {"texts": [text], "truncate": "NONE"}),
        ):
            assert "far more tokens" in refusal(server.post(path, body))["message"]
        assert answered(server.post("/v2/rerank", {"query": "a", "documents": [text], "max_tokens_per_doc": 9}))
