"""`/v1/embeddings` over real sockets: vectors equal transformers', beside any other requests and in all encodings."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import encoder_zoo as zoo
import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import swept
from server.api.test_long_inputs import heard
from server.conftest import RunningServer, ServerProcess, StartServer

from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.errors import ModelError

EMBEDDINGS = "/v1/embeddings"
CHAT = {"messages": [{"role": "user", "content": "SAY(a)YAS"}]}
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    models = {"embed": "bert", "prompted": "bert-prompts", "raw": "roberta-cls", "rank": "bert-cross"}
    encoders = load_encoders([str(zoo.folder(name)) for name in models.values()], list(models))
    return start_server(encoders=encoders)


@pytest.fixture(scope="module")
def real() -> Iterator[ServerProcess]:
    process = ServerProcess(
        "--embedding-model", str(zoo.folder("bert")), str(zoo.folder("bert-cross")),
        "--served-embedding-model-name", "embed", "rank", "--embedding-threads", "2",
    )  # fmt: skip
    yield process
    process.stop()


def vectors(response: httpx.Response) -> np.ndarray[Any, Any]:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return np.array([item["embedding"] for item in data], np.float32)


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code in (400, 404), response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("encoding", [openai.omit, swept("float"), swept("base64")])
def test_the_openai_client(real: ServerProcess, encoding: Any) -> None:
    texts = zoo.texts(20, most=14)
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as sdk:
        answer = sdk.embeddings.create(model="embed", input=texts, encoding_format=encoding)
        assert {"embed", "rank", "tidewheel-demo"} == {model.id for model in sdk.models.list()}
        chat = sdk.chat.completions.create(
            model="tidewheel-demo", messages=[{"role": "user", "content": "Who are you?"}], max_tokens=4
        )
    assert chat.choices[0].message.content
    got: list[Any] = [item.embedding for item in answer.data]
    if encoding == "base64":
        got = [np.frombuffer(base64.b64decode(item), "<f4") for item in got]
    np.testing.assert_allclose(np.array(got), zoo.reference("bert", texts), **TOLERANCE)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens
    assert answer.usage.total_tokens == sum(len(zoo.tokenizer("bert")(text)["input_ids"]) for text in texts)


def test_numbers_and_base64_are_the_same_floats(server: RunningServer) -> None:
    body = {"model": "embed", "input": "the tide turns a wheel"}
    numbers = vectors(server.post(EMBEDDINGS, body))
    text = server.post(EMBEDDINGS, {**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    np.testing.assert_array_equal(numbers[0], np.frombuffer(base64.b64decode(text), "<f4"))


def test_token_ids_are_taken_as_they_are(server: RunningServer) -> None:
    texts = ["the tide", "corn", "rain and rain"]
    ids = [zoo.tokenizer("bert")(text)["input_ids"] for text in texts]
    wanted = zoo.reference("bert", texts)
    np.testing.assert_allclose(vectors(server.post(EMBEDDINGS, {"model": "embed", "input": ids})), wanted, **TOLERANCE)
    one = vectors(server.post(EMBEDDINGS, {"model": "embed", "input": ids[0]}))
    np.testing.assert_allclose(one, wanted[:1], **TOLERANCE)
    bare = vectors(server.post(EMBEDDINGS, {"model": "embed", "input": texts[0], "add_special_tokens": False}))
    np.testing.assert_allclose(
        bare, vectors(server.post(EMBEDDINGS, {"model": "embed", "input": ids[0][1:-1]})), **TOLERANCE
    )


def test_dimensions(server: RunningServer) -> None:
    text = "the wheel grinds corn"
    (whole,) = zoo.reference("bert", [text])
    (cut,) = vectors(server.post(EMBEDDINGS, {"model": "embed", "input": text, "dimensions": 8}))
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), **TOLERANCE)
    error = refusal(server.post(EMBEDDINGS, {"model": "embed", "input": text, "dimensions": 33}))
    assert (error["param"], error["type"]) == ("dimensions", "invalid_request_error")
    assert "between 1 and 32" in error["message"]


def test_a_model_normalizes_as_it_says_unless_told(server: RunningServer) -> None:
    text = "the wheel grinds corn"
    raw = zoo.reference("roberta-cls", [text])
    assert abs(np.linalg.norm(raw) - 1) > 0.1
    np.testing.assert_allclose(vectors(server.post(EMBEDDINGS, {"model": "raw", "input": text})), raw, **TOLERANCE)
    told = vectors(server.post(EMBEDDINGS, {"model": "raw", "input": text, "normalize": True}))
    np.testing.assert_allclose(told, raw / np.linalg.norm(raw), **TOLERANCE)


def test_prompts_by_name(server: RunningServer) -> None:
    body = {"model": "prompted", "input": "corn", "prompt_name": "query"}
    wanted = zoo.reference("bert-prompts", ["corn"], prompt=zoo.PROMPTS["query"])
    np.testing.assert_allclose(vectors(server.post(EMBEDDINGS, body)), wanted, **TOLERANCE)
    error = refusal(server.post(EMBEDDINGS, {**body, "prompt_name": "question"}))
    assert error["param"] == "prompt_name"
    assert "query, passage, plain" in error["message"]


def test_long_inputs_are_refused_or_cut(server: RunningServer) -> None:
    text = " ".join(zoo.WORDS * 5)
    body: dict[str, Any] = {"model": "embed", "input": ["short", text]}
    error = refusal(server.post(EMBEDDINGS, body))
    assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")
    assert "truncate_prompt_tokens" in error["message"]
    cut = vectors(server.post(EMBEDDINGS, {**body, "truncate_prompt_tokens": -1}))
    np.testing.assert_allclose(cut, zoo.reference("bert", body["input"], max_length=64), **TOLERANCE)
    shorter = vectors(server.post(EMBEDDINGS, {**body, "truncate_prompt_tokens": 10}))
    np.testing.assert_allclose(shorter, zoo.reference("bert", body["input"], max_length=10), **TOLERANCE)
    ids = server.post(EMBEDDINGS, {"model": "embed", "input": [5] * 100, "truncate_prompt_tokens": 64})
    assert ids.json()["usage"]["total_tokens"] == 64


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": None}, "input"),
        ({"input": [1, 10**9]}, "input"),
        ({"input": [1, -1]}, "input"),
        ({"input": [[1], [2**70]]}, "input[1]"),
        ({"input": "", "add_special_tokens": False}, "input"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "8"}, "dimensions"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"messages": []}, "messages"),
        ({"task": "retrieval.query"}, "task"),
        ({"model": "scripted"}, "model"),
        ({"model": "none"}, "model"),
        ({"model": "rank"}, "model"),
    ],
)
def test_errors_name_the_field(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    error = refusal(server.post(EMBEDDINGS, {"model": "embed", "input": "the tide", **fields}))
    assert error["param"] == param
    assert param.partition("[")[0] in error["message"]


ANY_INPUT = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 200) | st.floats() | st.text(max_size=40) | st.sampled_from(zoo.WORDS),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


@settings(deadline=None, max_examples=50)
@given(
    ANY_INPUT,
    st.sampled_from([None, "float", "base64"]),
    st.none() | st.integers(-2, 40),
    st.none() | st.integers(-2, 80),
)
def test_any_input_gives_vectors_or_says_what_is_wrong(
    server: RunningServer, given_input: Any, encoding: str | None, dimensions: int | None, limit: int | None
) -> None:
    body = {
        "input": given_input,
        "encoding_format": encoding,
        "dimensions": dimensions,
        "truncate_prompt_tokens": limit,
    }
    response = server.http.post(EMBEDDINGS, content=json.dumps(body, allow_nan=True).encode())
    if response.status_code == 200:
        data = response.json()["data"]
        is_list = isinstance(given_input, list) and not isinstance(given_input[0], int)
        assert len(data) == (len(given_input) if is_list else 1)
        if encoding != "base64":
            assert all(len(item["embedding"]) == (dimensions or 32) for item in data)
    else:
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]


def test_many_requests_at_once_get_what_each_gets_alone(server: RunningServer) -> None:
    count = 80
    texts = zoo.texts(count + 5, seed=5, most=14)
    requests = [texts[i : i + 1 + i % 5] for i in range(count)]

    async def ask(client: httpx.AsyncClient, model: str, request: list[str]) -> np.ndarray[Any, Any]:
        return vectors(await client.post(EMBEDDINGS, json={"model": model, "input": request}))

    async def together() -> list[np.ndarray[Any, Any]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False, limits=limits) as client:
            models = ["embed" if i % 2 else "raw" for i in range(count)]
            return list(await asyncio.gather(*map(ask, [client] * count, models, requests)))

    wanted = {"embed": zoo.reference("bert", texts), "raw": zoo.reference("roberta-cls", texts)}
    before = server.http.get("/metrics").text
    for i, got in enumerate(asyncio.run(together())):
        np.testing.assert_allclose(got, wanted["embed" if i % 2 else "raw"][i : i + len(got)], **TOLERANCE)
    after = server.http.get("/metrics").text
    batches = [metric(text, "encoder_batches_total", model) for text in (before, after) for model in ("embed", "raw")]
    assert batches[2] - batches[0] + batches[3] - batches[1] < count  # requests shared them


def metric(text: str, name: str, model: str, **labels: str) -> float:
    wanted = ",".join(f'{key}="{value}"' for key, value in sorted({"model_name": model, **labels}.items()))
    for line in text.splitlines():
        key, _, value = line.rpartition(" ")
        found, _, listed = key.partition("{")
        if found == f"tidewheel:{name}" and ",".join(sorted(listed.rstrip("}").split(","))) == wanted:
            return float(value)
    raise AssertionError(f"no {name} for {model} with {labels}")


def test_metrics_count_requests_and_tokens(server: RunningServer) -> None:
    before = server.http.get("/metrics").text
    server.post(EMBEDDINGS, {"model": "prompted", "input": ["the tide", "corn"]})
    after = server.http.get("/metrics").text
    assert metric(after, "encoder_tokens_total", "prompted") - metric(before, "encoder_tokens_total", "prompted") == 7
    counts = [metric(text, "encoder_requests_total", "prompted", finished_reason="stop") for text in (before, after)]
    assert counts[1] - counts[0] == 1
    assert metric(after, "encoder_inputs_waiting", "prompted") == 0
    assert metric(after, "encoder_request_latency_seconds_count", "prompted") >= 1


def test_a_client_that_has_gone_does_not_keep_the_queue(start_server: StartServer) -> None:
    encoders = load_encoders([str(zoo.folder("bert"))], ["embed"])
    server = start_server(encoders=encoders)
    body = json.dumps({"input": [[20 + i % 9] * 64 for i in range(2048)]}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        head = f"POST {EMBEDDINGS} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: encoders.stats()["embed"].batches_total > 0)
    until(lambda: encoders.stats()["embed"].inputs_waiting == 0)
    text = server.http.get("/metrics").text
    if metric(text, "encoder_requests_total", "embed", finished_reason="abort"):  # else it was served before it left
        assert encoders.stats()["embed"].tokens_total < 2048 * 64
    assert vectors(server.post(EMBEDDINGS, {"input": "still here"})).shape == (1, 32)


@pytest.mark.sweep
def test_sigterm_lets_running_requests_finish() -> None:
    process = ServerProcess("--embedding-model", str(zoo.folder("bert")))
    answers: list[httpx.Response] = []
    body = {"input": [[20 + i % 9] * 64 for i in range(1000)], "encoding_format": "base64"}

    def ask() -> None:
        answers.append(httpx.post(process.url + EMBEDDINGS, json=body, timeout=60, trust_env=False))

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: metric(httpx.get(f"{process.url}/metrics", trust_env=False).text, "encoder_batches_total", "bert"))
    process.process.terminate()
    thread.join(60)
    assert process.process.wait(30) == 0
    process.stop()
    assert len(answers[0].json()["data"]) == 1000


def test_health_tells_of_a_dead_encoder_thread(start_server: StartServer) -> None:
    encoders = load_encoders([str(zoo.folder("bert"))], ["embed"])
    server = start_server(encoders=encoders)
    assert server.http.get("/health").status_code == 200
    encoders.failure = RuntimeError("out of order")
    response = server.http.get("/health")
    assert response.status_code == 503
    assert "out of order" in response.json()["error"]["message"]


def until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_models_are_listed_and_kept_apart(server: RunningServer) -> None:
    cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
    assert list(cards) == ["scripted", "embed", "prompted", "raw", "rank"]
    assert cards["embed"]["max_model_len"] == 64
    assert cards["embed"]["root"] == "embed"
    assert server.http.get("/v1/models/rank").json()["id"] == "rank"
    error = refusal(server.post("/v1/chat/completions", {"model": "embed", **CHAT}))
    assert error["param"] == "model"
    assert "/v1/embeddings" in error["message"]
    assert "/v1/rerank" in refusal(server.post(EMBEDDINGS, {"model": "rank", "input": "a"}))["message"]
    assert server.post("/v1/chat/completions", CHAT).status_code == 200


def test_without_embedding_models_the_endpoints_say_how_to_have_some(start_server: StartServer) -> None:
    bare = start_server()
    bodies = {EMBEDDINGS: {"input": "a"}, "/v1/score": {"text_1": "a", "text_2": "b"}}
    bodies["/v1/rerank"] = {"query": "a", "documents": "b"}
    for path, body in {**bodies, "/v1/rerank": {"query": "a", "documents": ["b"]}}.items():
        response = bare.post(path, body)
        assert response.status_code == 404
        assert "--embedding-model" in response.json()["error"]["message"]
    assert "encoder" not in bare.http.get("/metrics").text


def test_two_models_cannot_have_one_name(start_server: StartServer) -> None:
    with pytest.raises(ModelError, match="scripted names the chat model and an embedding model"):
        start_server(encoders=load_encoders([str(zoo.folder("bert"))], ["scripted"]))


def test_requests_are_logged_without_their_texts(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        server.post(EMBEDDINGS, {"model": "embed", "input": "a secret"}, headers={"x-request-id": "mine"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tidewheel.requests"]
    assert "x-request-id=mine model=embed inputs=1 tokens=" in line
    assert line.endswith("finish=stop")
    assert "secret" not in caplog.text


@pytest.mark.parametrize("text", ["the tide " * 1_500_000, " " * 12_000_000, "7" * 10_000_000])
def test_far_too_long_texts_are_refused_or_cut(server: RunningServer, text: str) -> None:
    body = {"model": "embed", "input": text + "corn"}
    with heard(server.url):
        error = refusal(server.post(EMBEDDINGS, body))
    assert error["code"] == "context_length_exceeded"
    assert "far more tokens" in error["message"]
    with heard(server.url):
        cut = vectors(server.post(EMBEDDINGS, {**body, "truncate_prompt_tokens": -1}))
    np.testing.assert_array_equal(
        cut, vectors(server.post(EMBEDDINGS, {**body, "input": text[:2000], "truncate_prompt_tokens": -1}))
    )


def test_a_long_query_is_encoded_once(server: RunningServer) -> None:
    body = {"model": "rank", "query": "the tide " * 500_000, "documents": ["a wheel"] * 200}
    with heard(server.url):
        assert refusal(server.post("/v1/rerank", body))["code"] == "context_length_exceeded"
        answer = server.post("/v1/rerank", {**body, "truncate_prompt_tokens": -1})
    assert answer.status_code == 200
    short = server.post("/v1/rerank", {**body, "query": "the tide " * 300, "truncate_prompt_tokens": -1})
    assert answer.json()["results"] == short.json()["results"]
