"""A server whose model is an encoder: nothing generates, and all else works as beside a chat model."""

from __future__ import annotations

import json
import logging
import signal
from pathlib import Path

import encoder_zoo as zoo
import httpx
import numpy as np
import pytest
from cores import one_core
from server.conftest import RefusedStart, RunningServer, ServerProcess, StartServer
from server.scripted_engine import ScriptedEngine
from starlette.routing import Route

from tidewheel.engine.declaring.option import OptionError
from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.encoders.load import load_encoders, load_model_alone
from tidewheel.engine.encoders.options import EncoderOptions
from tidewheel.engine.encoders.settings import pools
from tidewheel.engine.errors import InvalidRequestError, ModelError
from tidewheel.engine.options import EngineOptions
from tidewheel.server.app import build_app
from tidewheel.server.app_options import AppOptions
from tidewheel.server.encoder_app import build_encoder_app
from tidewheel.server.options.model import DEMO_MODEL

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    encoders = load_encoders(
        [str(zoo.native_folder("bert")), str(zoo.native_folder("distilbert-cross"))], ["embed", "rank"]
    )
    return start_server(encoders=encoders, chat=False, served_model_names=["embed", "alias"])


def test_its_endpoints_work_under_all_its_names(server: RunningServer) -> None:
    listed = server.http.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["embed", "rank", "alias"]
    assert [card["output_modalities"] for card in listed] == [["embeddings"], ["scores"], ["embeddings"]]
    vectors = [
        server.post(EMBEDDINGS, {"input": "the tide", **model}).json()["data"]
        for model in ({}, {"model": "embed"}, {"model": "alias"})
    ]
    assert vectors[0] == vectors[1] == vectors[2]
    assert server.post(EMBEDDINGS, {"input": "a", "model": "alias"}).json()["model"] == "embed"
    assert server.post("/v1/score", {"text_1": "a", "text_2": "b"}).json()["model"] == "rank"
    assert server.post("/api/embed", {"input": "the tide", "model": "embed:latest"}).json()["embeddings"]
    refused = server.post(EMBEDDINGS, {"input": "a", "model": "other"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_any_name_is_answered_if_names_are_not_checked(start_server: StartServer) -> None:
    encoders = load_encoders([str(zoo.native_folder("bert"))], ["embed"])
    server = start_server(encoders=encoders, chat=False, skip_model_name_validation=True)
    assert server.post(EMBEDDINGS, {"input": "a", "model": "other"}).json()["model"] == "embed"


def test_what_generates_says_that_there_is_no_chat_model(server: RunningServer) -> None:
    said = "this server has no chat model, and {} needs one: 'embed' is for "
    for path in ("/v1/chat/completions", "/completions", "/v1/responses", "/tokenize"):
        answer = server.post(path, {})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith(said.format(path))
        assert answer.json()["error"]["code"] == "no_chat_model"
    anthropic, ollama = server.post("/v1/messages", {}), server.post("/api/chat", {})
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (404, "not_found_error")
    assert anthropic.json()["error"]["message"].startswith(said.format("/v1/messages"))
    assert (ollama.status_code, ollama.json()["error"][:33]) == (404, said.format("/api/chat")[:33])


def test_it_has_every_path_that_a_chat_model_s_server_has() -> None:
    encoders = load_encoders([str(zoo.native_folder("bert"))], ["embed"])
    alone, beside = (
        {(route.path, *sorted(route.methods or ())) for route in app.routes if isinstance(route, Route)}
        for app in (build_encoder_app(encoders, AppOptions()), build_app(ScriptedEngine(), AppOptions(), encoders))
    )
    assert alone == beside


def test_ollama_s_clients_see_what_it_is(server: RunningServer) -> None:
    tags = server.http.get("/api/tags").json()["models"]
    assert tags[0]["name"] == "embed:latest"
    assert (tags[0]["details"]["format"], tags[0]["details"]["family"], tags[0]["size"] > 0) == (
        "safetensors",
        "bert",
        True,
    )
    shown = server.post("/api/show", {}).json()
    assert shown["capabilities"] == ["embedding"]
    width = len(server.post(EMBEDDINGS, {"input": "a"}).json()["data"][0]["embedding"])
    assert shown["model_info"]["bert.embedding_length"] == width


def test_it_is_watched_like_other_servers(server: RunningServer) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert 'encoder_batches_total{model_name="embed"}' in server.http.get("/metrics").text
    assert server.http.get("/load").json()["server_load"] == 0
    info = server.http.get("/server_info").json()
    assert (info["model"], info["engine"]["architecture"]) == ("embed", "bert")
    assert server.http.get("/").status_code == 200
    assert "/v1/embeddings" in server.http.get("/openapi.json").json()["paths"]
    body = {"input": "a"}
    assert server.post("/invocations", body).json()["data"] == server.post(EMBEDDINGS, body).json()["data"]


def alone(folder: Path, **options: object) -> dict[str, object]:
    """What is known of an encoder that is loaded with options of a command."""
    own = {name: options.pop(name) for name in ("pooler_config", "convert") if name in options}
    engine = EngineOptions(model=str(folder), **options)  # type: ignore[arg-type]
    loaded = load_model_alone(engine, EncoderOptions(threads=1, **own), ["it"])  # type: ignore[arg-type]
    encoder = loaded.encoders["it"]
    results = encoder.run(encoder.task, [encoder.encode("the tide is high")])
    return {"encoder": encoder, "row": encoder.finished(encoder.task, results)[0]}


def test_options_of_the_command_are_the_encoder_s() -> None:
    folder = zoo.native_folder("bert")
    plain = alone(folder)
    cut = alone(folder, pooler_config={"pooling_type": "CLS", "use_activation": False, "dimensions": 4})
    assert cut["row"].shape == (4,)  # type: ignore[attr-defined]
    assert not np.allclose(cut["row"], plain["row"][:4])  # type: ignore[index,arg-type]
    assert not np.isclose(np.linalg.norm(cut["row"]), 1)  # type: ignore[arg-type]
    encoder: Encoder = cut["encoder"]  # type: ignore[assignment]
    plan = encoder.plan_scores(["the tide is high"], ["a wheel"])
    rows = np.stack(encoder.run(plan.task, plan.inputs))[:, :4]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(plan.scores(encoder.run(plan.task, plan.inputs)), [rows[0] @ rows[1]], rtol=1e-5)
    assert alone(folder, max_model_len=12)["encoder"].max_length == 12  # type: ignore[attr-defined]
    for method in ("int8", "int8-channel"):
        assert alone(folder, quantization=method)["encoder"].info["weights"] == method  # type: ignore[attr-defined]
    assert alone(folder, dtype="bfloat16")["encoder"].info["weights"] == "bfloat16"  # type: ignore[attr-defined]


def test_a_classifier_reads_what_its_head_says() -> None:
    folder = zoo.native_folder("distilbert-cross")
    plain = alone(folder, pooler_config={"pooling_type": "CLS"})
    raw = alone(folder, pooler_config={"softmax": False})
    np.testing.assert_allclose(plain["row"], 1 / (1 + np.exp(-raw["row"])), rtol=1e-6)  # type: ignore[operator,arg-type]
    with pytest.raises(ModelError, match=r"whose head says what it reads \(CLS\)"):
        alone(folder, pooler_config={"pooling_type": "MEAN"})
    for kind in ("CLS", "MEAN"):
        with pytest.raises(ModelError, match=r"whose head says what it reads \(each token\)"):
            alone(zoo.native_folder("bert-tokens"), pooler_config={"pooling_type": kind})


def test_bits_need_eight_dimensions_before_anything_is_computed(start_server: StartServer) -> None:
    options = EncoderOptions(threads=1, pooler_config={"dimensions": 12})
    encoders = load_model_alone(EngineOptions(model=str(zoo.native_folder("bert"))), options, ["it"])
    server = start_server(encoders=encoders, chat=False)
    body = {"texts": ["the tide"], "embedding_types": ["ubinary"]}
    refused = server.post("/v2/embed", body)
    assert refused.status_code == 400
    assert "the vectors have 12" in refused.json()["error"]["message"]
    assert encoders.stats()["it"].batches_total == 0
    bits = server.post("/v2/embed", {**body, "output_dimension": 8}).json()["embeddings"]["ubinary"]
    assert [len(row) for row in bits] == [1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"convert": "classify"}, "--convert classify does not fit .*, which gives embeddings"),
        ({"max_model_len": 10**6}, "--max-model-len 1000000 is more than the"),
        ({"pooler_config": {"dimensions": 10**6}}, "--pooler-config: dimensions must be between 1 and"),
    ],
    ids=str,
)
def test_what_an_encoder_cannot_be(options: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        alone(zoo.native_folder("bert"), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"load_format": "safetensors"}, "--load-format safetensors is for models that generate: leave it out"),
        ({"quantization": "int8", "dtype": "float32"}, "keeps the rest in bfloat16: leave --dtype float32 out"),
    ],
    ids=str,
)
def test_options_without_effect_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        alone(zoo.native_folder("bert"), **options)


def test_a_graph_has_a_type_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match="has a type of its own: leave --dtype, --quantization and --embedding-dtype"):
        alone(zoo.folder("bert"), dtype="bfloat16")
    with caplog.at_level(logging.INFO):
        load_encoders([str(zoo.folder("bert"))], dtype="int8").close()
    assert "--embedding-dtype has no effect on" in caplog.text


@pytest.mark.parametrize("names", [["it"], ["first", "it"]])
def test_two_encoders_of_one_name_are_refused(names: list[str]) -> None:
    folder = str(zoo.native_folder("bert"))
    with pytest.raises(OptionError, match=r"are both named it: .*--served-embedding-model-name"):
        load_model_alone(EngineOptions(folder), EncoderOptions(models=[folder], names=["it"]), names)


@pytest.mark.sweep
def test_a_graph_that_pools_cannot_pool_in_another_way() -> None:
    with pytest.raises(ModelError, match="pools the tokens itself: leave pooling_type and use_activation out"):
        alone(zoo.folder("bert-dense"), pooler_config={"pooling_type": "CLS"})


def test_what_only_a_chat_model_has_is_refused(refused_start: RefusedStart) -> None:
    flags = ("--tokenizer", "x", "--quantization", "fp8", "--enable-lora", "--device", "cuda")
    code, said = refused_start(str(zoo.native_folder("bert")), *flags)
    assert code == 1
    for sentence in (
        "--tokenizer and --enable-lora are for models that generate: leave them out",
        "--quantization fp8 is for models that generate: encoders have int8",
        "--device cuda runs no encoders: leave it out, and they run on the processor",
    ):
        assert sentence in said


def test_a_pooler_config_needs_a_model_that_pools() -> None:
    given = EncoderOptions(pooler_config={"pooling_type": "CLS"})
    assert pools(EngineOptions(model=str(zoo.native_folder("bert"))), given)
    with pytest.raises(OptionError, match="--pooler-config needs a MODEL that pools: add --runner pooling, or leave"):
        pools(EngineOptions(model=str(DEMO_MODEL)), given)


def test_dimensions_that_the_model_was_not_trained_for() -> None:
    def check(dimensions: int, **config: object) -> None:
        encoder = alone(zoo.native_folder("bert"), hf_overrides=config)["encoder"]
        encoder.check_task("embed", dimensions=dimensions)  # type: ignore[attr-defined]

    check(5)
    check(5, is_matryoshka=True)
    check(8, matryoshka_dimensions=[8, 4])
    with pytest.raises(InvalidRequestError, match="dimensions must be one of 4, 8, which it was trained for, got 5"):
        check(5, matryoshka_dimensions=[8, 4])
    with pytest.raises(InvalidRequestError, match="dimensions must be left out: the config of it says"):
        check(5, is_matryoshka=False)
    with pytest.raises(ModelError, match="matryoshka_dimensions must be a list of numbers"):
        check(5, matryoshka_dimensions=[8, "4"])


def test_the_command_finds_out_and_ends_well() -> None:
    """The real command: no runner is given, and SIGTERM ends it with nothing left."""
    process = ServerProcess(
        *(str(zoo.native_folder("bert")), "--embedding-threads", "1", "--max-num-seqs", "4"),
        *("--tool-call-parser", "hermes", "--threads-bind", one_core()),
    )
    try:
        answer = httpx.post(process.url + EMBEDDINGS, content=json.dumps({"input": "a"}), trust_env=False,
            headers={"content-type": "application/json"})  # fmt: skip
        assert answer.status_code == 200
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(20) == 0
    finally:
        process.stop()
    assert "--max-num-seqs has no effect: the model is an encoder" in process.log
    assert "--tool-call-parser has no effect: it is for models that generate" in process.log
    assert "nanobind" not in process.log
