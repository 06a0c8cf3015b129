"""Heads give transformers' logits: several labels of a text, labels of tokens, and SPLADE's weights of words."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import encoder_zoo as zoo
import numpy as np
import pytest
import torch
from optional_packages import require_packages
from safetensors.numpy import save_file
from samples import sample

from tidewheel.engine.encoders import model as encoder_models
from tidewheel.engine.encoders.as_asked import as_asked
from tidewheel.engine.encoders.classifier import Classifier
from tidewheel.engine.encoders.description import describe_encoder
from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.encoders.pooling import Floats
from tidewheel.engine.encoders.settings import EncoderSettings
from tidewheel.engine.encoders.sparse_encoder import SparseEncoder
from tidewheel.engine.errors import InvalidRequestError, ModelError

pytest.importorskip("tidewheel._native")
require_packages("transformers")

TEXTS = [*zoo.texts(5, seed=4, most=12), " ".join(zoo.WORDS)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def of(kind: str) -> list[str]:
    return [name for name in zoo.HEADS if name.endswith(kind)]


OFTEN = {"bert-tokens", "roberta-tokens", "modernbert-tokens", "bert-labels", "modernbert-labels"}
OFTEN |= {"bert-splade", "modernbert-splade"}


def load(folder: Path) -> Any:
    return load_encoders([str(folder)], ["it"]).encoders["it"]


def logits_of(name: str, text: str) -> torch.Tensor:
    """Transformers' logits for one text."""
    fields = zoo.tokenizer(name)(
        text, return_tensors="pt", return_token_type_ids=zoo.case_of(name).model_type == "bert"
    )
    with torch.no_grad():
        return zoo.model(name)(**fields)[0][0]


def assert_same_alone(encoder: Any, inputs: list[Any], together: list[Floats]) -> None:
    for item, result in zip(inputs, together, strict=True):
        np.testing.assert_array_equal(encoder.run(encoder.task, [item])[0], result)


@pytest.mark.parametrize("name", sample([*of("-tokens"), *of("-labels")], OFTEN.__contains__))
def test_labels_are_transformers(name: str) -> None:
    encoder = load(zoo.native_folder(name))
    assert isinstance(encoder, Classifier)
    assert encoder.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert encoder.tasks == {"token_classify" if name.endswith("-tokens") else "classify"}
    inputs = [encoder.encode(text) for text in TEXTS]
    results = encoder.run(encoder.task, inputs)
    for text, logits in zip(TEXTS, results, strict=True):
        np.testing.assert_allclose(logits, logits_of(name, text), atol=1e-4)
    assert_same_alone(encoder, inputs, results)
    with pytest.raises(InvalidRequestError, match="no score"):
        encoder.plan_scores(["the tide"], ["a wheel"])


def test_problem_types_choose_the_activation() -> None:
    activations = {name: describe_encoder(zoo.native_folder(name)).activation for name in OFTEN if "-s" not in name}
    assert activations.pop("bert-labels") == "sigmoid"
    assert set(activations.values()) == {"softmax"}


def splade(name: str, text: str) -> Floats:
    """The formula of SPLADE's pooling, over all words."""
    weights = torch.log1p(torch.relu(logits_of(name, text)))
    config = zoo.case_of(name).files["1_SpladePooling/config.json"]
    if config.get("activation_function") == "log1p_relu":
        weights = torch.log1p(weights)
    return (weights.sum(0) if config["pooling_strategy"] == "sum" else weights.max(0).values).numpy()


@pytest.mark.parametrize("name", sample(of("-splade"), OFTEN.__contains__))
def test_weights_of_words_are_splade_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_models, "_WORDS", 100)  # the last block is smaller
    encoder = load(zoo.native_folder(name))
    assert isinstance(encoder, SparseEncoder)
    assert encoder.tasks == {"sparse"}
    inputs = [encoder.encode(text) for text in TEXTS]
    results = encoder.run("sparse", inputs)
    for text, result in zip(TEXTS, results, strict=True):
        dense = np.zeros(encoder.vocab_size, np.float32)
        dense[result[:, 0].astype(int)] = result[:, 1]
        np.testing.assert_allclose(dense, splade(name, text), atol=1e-4)
        assert (np.diff(result[:, 0]) > 0).all()
        assert (result[:, 1] > 0).all()
    assert 10 < min(map(len, results)) < encoder.vocab_size
    assert_same_alone(encoder, inputs, results)
    plan = encoder.plan_scores(TEXTS[:1], TEXTS[1:3])
    wanted = [splade(name, TEXTS[0]) @ splade(name, text) for text in TEXTS[1:3]]
    np.testing.assert_allclose(plan.scores(encoder.run(plan.task, plan.inputs)), wanted, rtol=1e-5)


def routed(folder: Path, **files: Any) -> Path:
    """The folder of a SPLADE model for documents, with a table of the weights of queries' words."""
    types = {"query_0_SparseStaticEmbedding": "a.SparseStaticEmbedding", "": "a.MLMTransformer", "p": "a.SpladePooling"}
    router = {
        "types": types,
        "structure": {"query": ["query_0_SparseStaticEmbedding"], "document": ["", "p"]},
        "parameters": {"default_route": "document"},
    }
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}]
    settings = {"model_type": "SparseEncoder"}
    files = {"modules": listed, "router_config": router, "config_sentence_transformers": settings} | files
    zoo.changed_folder(zoo.native_folder("bert-splade"), folder, p__config={"pooling_strategy": "max"}, **files)
    (query := folder / "query_0_SparseStaticEmbedding").mkdir()
    (query / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    table = np.arange(zoo.tokenizer("bert").vocab_size, dtype=np.float32) % 5 / 2
    save_file({"weight": table}, query / "model.safetensors")
    return folder


def test_queries_of_a_router_have_the_weights_of_their_words(tmp_path: Path) -> None:
    encoder, plain = load(routed(tmp_path / "model")), load(zoo.native_folder("bert-splade"))
    query, documents = "corn the tide corn", TEXTS[:3]
    ids = plain.tokenizer.encode(query, add_special_tokens=False).token_ids
    wanted = {i: i % 5 / 2 for i in ids if i % 5}
    assert 0 < len(wanted) < len(ids)
    inputs = [encoder.encode(documents[0]), encoder.encode(query, prompt_name="query")]
    inputs += [encoder.encode(text, prompt_name="document") for text in documents[1:]]
    computed = [plain.run("sparse", [plain.encode(text)])[0] for text in documents]
    pieces = encoder.pieces("sparse", inputs)
    for found in (encoder.run("sparse", inputs), finished(pieces)):
        first, own, *others = found
        assert dict(own.tolist()) == wanted
        for ours, theirs in zip([first, *others], computed, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert finished(encoder.pieces("sparse", inputs[1:2]))[0].tolist() == own.tolist()
    plan = encoder.plan_scores([query], documents)
    scores = [sum(wanted.get(int(i), 0) * weight for i, weight in rows) for rows in computed]
    np.testing.assert_allclose(plan.scores(encoder.run(plan.task, plan.inputs)), scores, rtol=1e-5)
    assert encoder.tokens([5, 6], prompt_name="query").is_static
    assert not encoder.tokens([5, 6]).is_static
    assert encoder.encode(query, prompt_name="query", truncate_to=2).token_ids == ids[:2]
    with pytest.raises(InvalidRequestError, match="has no prompt 'passage'; it has query, document"):
        encoder.encode(query, prompt_name="passage")


def finished(pieces: Generator[None, None, list[Floats]]) -> list[Floats]:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            found: list[Floats] = end.value
            return found


def test_a_router_of_other_modules_is_refused(tmp_path: Path) -> None:
    def refused(said: str, **changed: Any) -> None:
        config = json.loads((folder / "router_config.json").read_text())
        (folder / "router_config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(ModelError, match=said):
            load(folder)
        (folder / "router_config.json").write_text(json.dumps(config))

    folder = routed(tmp_path / "model")
    refused("a Router is served if", structure={"query": ["", "p"], "document": ["", "p"]})
    refused("a Router is served if", structure={"document": ["", "p"]})
    refused("must have the objects", structure=[])
    refused("default_route must be query or document", parameters={"default_route": "passage"})
    refused("default_route must be query or document", parameters={"default_route": [1]})
    save_file({"weight": np.full(9, -1, np.float32)}, folder / "query_0_SparseStaticEmbedding" / "model.safetensors")
    refused("must have a vector of weights from 0 on")
    listed = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*listed, {**listed[0], "type": "a.Normalize"}]))
    refused("'Normalize' behind a Router is not supported")


def test_a_decoder_matrix_of_its_own_is_taken(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    folder = zoo.changed_folder(zoo.native_folder("bert-splade"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    assert "cls.predictions.decoder.weight" not in tensors
    tensors["cls.predictions.decoder.weight"] = np.zeros_like(tensors["bert.embeddings.word_embeddings.weight"])
    tensors["cls.predictions.decoder.bias"] = np.full_like(tensors["cls.predictions.bias"], -1)
    tensors["cls.predictions.decoder.bias"][7] = 2
    save_file(tensors, folder / "model.safetensors")
    encoder = load(folder)
    np.testing.assert_allclose(encoder.run("sparse", [encoder.encode("corn")])[0], [[7, np.log(3)]], rtol=1e-6)


def test_a_model_that_predicts_words_is_an_embedder_unless_its_folder_says_sparse(tmp_path: Path) -> None:
    source = zoo.native_folder("bert-splade")
    plain = describe_encoder(zoo.changed_folder(source, tmp_path / "plain", modules=None))
    assert (plain.task, plain.pooling) == ("embed", ("mean",))
    settings = {"model_type": "SparseEncoder"}
    files = {"modules": None, "config_sentence_transformers": settings}
    sparse = describe_encoder(zoo.changed_folder(source, tmp_path / "sparse", **files))
    assert sparse.task == "sparse"
    assert sparse.model is not None
    assert sparse.model.head is not None
    assert (sparse.model.head.pooling, sparse.model.head.log_twice) == ("max", False)


@pytest.mark.parametrize("given", [{"pooling_type": "CLS"}, {"use_activation": False}])
def test_the_pooling_of_a_sparse_encoder_cannot_be_chosen(given: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="is a model for sparse, which has no pooling to choose"):
        as_asked(describe_encoder(zoo.native_folder("bert-splade")), EncoderSettings(pooler=given))


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        ("bert-splade", {"1_SpladePooling__config": {"pooling_strategy": "mean"}}, "must be max or sum, got 'mean'"),
        (
            "bert-splade",
            {"1_SpladePooling__config": {"activation_function": "gelu"}},
            "must be one of relu, log1p_relu",
        ),
        ("bert-splade", {"1_SpladePooling__config": {"activation_function": []}}, "must be one of relu, log1p_relu"),
        ("bert-splade", {"config": {"architectures": ["BertModel"]}}, "does not predict words here"),
        ("bert-splade", {"config": {"architectures": ["XLNetModel"]}}, "a model for sparse, which needs safetensors"),
        ("bert-tokens", {"config": {"architectures": ["XLNetForTokenClassification"]}}, "'XLNet.* does not run from"),
    ],
)
def test_what_cannot_be_served_is_said(name: str, files: dict[str, Any], said: str, tmp_path: Path) -> None:
    source = zoo.native_folder(name)
    if "config" in files:
        files = {"config": json.loads((source / "config.json").read_text()) | files["config"]}
    with pytest.raises(ModelError, match=said):
        describe_encoder(zoo.changed_folder(source, tmp_path / "model", **files))
