"""Encoders give what transformers gives, alone and in batches with any others."""

from __future__ import annotations

import json
from pathlib import Path

import encoder_zoo as zoo
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.encoders.classifier import Classifier
from tidewheel.engine.encoders.embedder import Embedder
from tidewheel.engine.encoders.encoder import MAX_RESULT_BYTES, Encoder
from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.encoders.tokenization import EncoderInput
from tidewheel.engine.errors import InvalidRequestError, ModelError

EMBEDDERS = [name for name, case in zoo.CASES.items() if not case.classifies]
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def load(name: str) -> Encoder:
    return load_folder(zoo.folder(name))


def load_folder(folder: Path) -> Encoder:
    return load_encoders([str(folder)], ["it"]).encoders["it"]


def embedder(name: str) -> Embedder:
    encoder = load(name)
    assert isinstance(encoder, Embedder)
    return encoder


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_are_transformers(name: str) -> None:
    encoder, texts = embedder(name), zoo.texts(10, most=10)
    prompt = encoder.prompts[encoder.default_prompt_name] if encoder.default_prompt_name else ""
    inputs = [encoder.encode(text) for text in texts]
    wanted = zoo.reference(name, texts, prompt=prompt)
    np.testing.assert_allclose(encoder.vectors(encoder.run("embed", inputs)), wanted, **TOLERANCE)
    alone = np.concatenate([encoder.vectors(encoder.run("embed", [item])) for item in inputs])
    np.testing.assert_allclose(alone, wanted, **TOLERANCE)
    assert encoder.takes_batches


@pytest.mark.parametrize("name", ["bert-cross", "roberta-cross"])
def test_scores_are_transformers(name: str) -> None:
    encoder = load(name)
    assert isinstance(encoder, Classifier)
    queries, documents = zoo.texts(8, seed=1, most=5), zoo.texts(8, seed=2, most=9)
    logits = zoo.reference(name, list(zip(queries, documents, strict=True)))[:, 0]
    wanted = 1 / (1 + np.exp(-logits)) if name == "bert-cross" else logits
    plan = encoder.plan_scores(queries, documents)
    np.testing.assert_allclose(plan.scores(encoder.run(plan.task, plan.inputs)), wanted, **TOLERANCE)
    one_query = encoder.plan_scores(queries[:1], documents)
    scores = one_query.scores(encoder.run(one_query.task, one_query.inputs))
    np.testing.assert_allclose(scores[:1], wanted[:1], **TOLERANCE)


def test_a_query_is_not_copied_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = load("bert-cross")
    monkeypatch.setattr("tidewheel.engine.encoders.classifier.MOST_QUERY_TOKENS", 30)
    query, documents = "the the the the the", ["tide"] * 7
    assert len(encoder.plan_scores([query], documents[:6]).inputs) == 6
    with pytest.raises(InvalidRequestError, match="too long for so many documents"):
        encoder.plan_scores([query], documents)
    assert len(encoder.plan_scores([query], documents, truncate_to=4).inputs) == 7


def test_several_labels_are_told_apart() -> None:
    encoder, texts = load("bert-classes"), zoo.texts(6, most=8)
    assert isinstance(encoder, Classifier)
    assert (encoder.labels, encoder.tasks) == (("calm", "rough", "stormy"), {"classify"})
    logits = encoder.run("classify", [encoder.encode(text) for text in texts])
    wanted = zoo.reference("bert-classes", texts)
    np.testing.assert_allclose(encoder.probabilities(logits, use_activation=False), wanted, **TOLERANCE)
    powers = np.exp(wanted)
    np.testing.assert_allclose(encoder.probabilities(logits), powers / powers.sum(axis=1, keepdims=True), **TOLERANCE)
    (one,) = encoder.finished("classify", logits[:1])
    np.testing.assert_allclose(one.sum(), 1, rtol=1e-6)
    for task, options, said in (
        ("embed", {}, "does not do embed; it does classify"),
        ("classify", {"dimensions": 2}, "none"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            encoder.check_task(task, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="tells 3 labels apart"):
        encoder.plan_scores(["the wheel"], texts)


@settings(deadline=None, max_examples=10)
@given(st.permutations(range(8)), st.integers(1, 8))
def test_a_batch_does_not_change_its_rows(order: list[int], count: int) -> None:
    encoder = embedder("bert")
    texts = zoo.texts(8, seed=3)
    chosen = order[:count]
    got = encoder.vectors(encoder.run("embed", [encoder.encode(texts[i]) for i in chosen]))
    np.testing.assert_allclose(got, zoo.reference("bert", texts)[chosen], **TOLERANCE)


@pytest.mark.parametrize("name", ["bert-prompts", "bert-instructor"])
@pytest.mark.parametrize("prompt", ["query", "passage", "plain"])
def test_prompts(name: str, prompt: str) -> None:
    encoder, texts = embedder(name), zoo.texts(5, most=8)
    got = encoder.vectors(encoder.run("embed", [encoder.encode(text, prompt_name=prompt) for text in texts]))
    np.testing.assert_allclose(got, zoo.reference(name, texts, prompt=zoo.PROMPTS[prompt]), **TOLERANCE)
    with pytest.raises(InvalidRequestError, match="query, passage, plain") as refused:
        encoder.encode("the tide", prompt_name="other")
    assert refused.value.param == "prompt_name"


def test_scores_of_an_embedding_model_are_cosines_behind_its_prompts() -> None:
    encoder, texts = embedder("bert-prompts"), zoo.texts(4, most=8)
    plan = encoder.plan_scores(["the wheel turns"], texts)
    query = zoo.reference("bert-prompts", ["the wheel turns"], prompt=zoo.PROMPTS["query"])
    documents = zoo.reference("bert-prompts", texts, prompt=zoo.PROMPTS["passage"])
    scores = plan.scores(encoder.run(plan.task, plan.inputs))
    np.testing.assert_allclose(scores, (documents @ query.T)[:, 0], **TOLERANCE)
    assert plan.sources == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_long_inputs_are_cut_as_transformers_cuts_them() -> None:
    encoder, text = embedder("bert"), " ".join(zoo.WORDS * 5)
    item = encoder.encode(text, truncate_to=encoder.max_length)
    assert len(item) == encoder.max_length == 64
    np.testing.assert_allclose(
        encoder.vectors(encoder.run("embed", [item])), zoo.reference("bert", [text], max_length=64), **TOLERANCE
    )


@pytest.mark.parametrize("name", ["bert", "roberta-cls", "distilbert-all", "mpnet-plain", "bert-cross"])
def test_the_longest_input_fits_the_positions(name: str) -> None:
    encoder = load(name)
    results = encoder.run(encoder.task, [EncoderInput([5] * encoder.max_length), EncoderInput([5])])
    assert np.isfinite(np.stack(results)).all()


def test_dimensions_are_cut_and_normalized_again() -> None:
    encoder = embedder("bert")
    rows = encoder.run("embed", [encoder.encode(text) for text in zoo.texts(3)])
    whole, cut = encoder.vectors(rows), encoder.vectors(rows, dimensions=8)
    assert cut.shape == (3, 8)
    np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(cut, whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True), **TOLERANCE)
    np.testing.assert_array_equal(encoder.vectors(rows, normalize=False), rows)
    for dimensions in (0, 33):
        with pytest.raises(InvalidRequestError, match="between 1 and 32") as refused:
            encoder.check_task("embed", dimensions=dimensions)
        assert refused.value.param == "dimensions"


def test_vectors_of_tokens_pool_to_that_of_the_text() -> None:
    encoder = embedder("bert")
    inputs = [encoder.encode(text) for text in zoo.texts(4)]
    of_tokens = encoder.run("token_embed", inputs)
    assert [len(rows) for rows in of_tokens] == [len(item) for item in inputs]
    means = np.stack([rows.mean(axis=0) for rows in of_tokens])
    np.testing.assert_allclose(means, encoder.run("embed", inputs), **TOLERANCE)
    np.testing.assert_allclose(np.linalg.norm(encoder.vectors(of_tokens[0]), axis=1), 1, rtol=1e-5)


def test_answers_of_too_many_numbers_are_refused() -> None:
    encoder = embedder("bert")
    text = EncoderInput([5] * 64)
    per_text = 64 * 32 * 4
    encoder.check_size("embed", [text] * 2048)
    encoder.check_size("token_embed", [text] * (MAX_RESULT_BYTES // per_text))
    with pytest.raises(InvalidRequestError, match="at most 32 MiB"):
        encoder.check_size("token_embed", [text] * (MAX_RESULT_BYTES // per_text + 1))


def test_a_graph_that_normalizes_cannot_leave_it_out() -> None:
    encoder = embedder("bert-dense")
    encoder.check_task("embed", dimensions=8, use_activation=True)
    with pytest.raises(InvalidRequestError) as refused:
        encoder.check_task("embed", use_activation=False)
    assert refused.value.param == "normalize"


@pytest.mark.parametrize(
    ("token_ids", "said"), [([], "no tokens"), ([1, -1], "between 0"), ([10**6], "between 0"), ([5] * 65, "65 tokens")]
)
def test_inputs_that_a_graph_must_not_see(token_ids: list[int], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as refused:
        load("bert").check(EncoderInput(token_ids), "input[3]")
    assert refused.value.param == "input[3]"


def test_a_graph_that_ignores_its_mask_runs_inputs_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = zoo.changed("bert", tmp_path / "model")
    zoo.export("bert", folder / "onnx" / "model.onnx", with_mask=False)
    assert not load_folder(folder).takes_batches
    assert "one by one" in caplog.text


def test_a_graph_whose_weights_are_not_finite_is_refused(tmp_path: Path) -> None:
    folder = zoo.changed("bert", tmp_path / "model")
    graph = folder / "onnx" / "model.onnx"
    model = onnx.load(graph)
    tensor = next(t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and len(t.dims) == 1)
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(tensor.dims, np.nan, np.float32), tensor.name))
    onnx.save(model, graph)
    with pytest.raises(ModelError, match=r"model.onnx does not run: it gives values that are not finite"):
        load_folder(folder)


def test_graphs_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    folder = zoo.changed("bert", tmp_path / "model")
    graph = folder / "onnx" / "model.onnx"
    zoo.export("bert", graph, fixed_shape=True)
    with pytest.raises(ModelError, match="dynamic axes"):
        load_folder(folder)
    zoo.export("bert-cross", graph)
    with pytest.raises(ModelError, match=r"no output token_embeddings or last_hidden_state .*; it has logits"):
        load_folder(folder)
    graph.write_bytes(b"not a graph")
    with pytest.raises(ModelError, match=r"model.onnx cannot be loaded"):
        load_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(architectures=["BertForSequenceClassification"], id2label={"0": "relevant"})
    (folder / "config.json").write_text(json.dumps(config))
    zoo.export("bert", graph)
    with pytest.raises(ModelError, match="no output logits; it has last_hidden_state"):
        load_folder(folder)


def test_modules_that_only_the_graph_could_compute_are_refused_by_name(tmp_path: Path) -> None:
    folder = zoo.changed("bert", tmp_path / "model", modules=zoo.modules("Pooling", "Dense")["modules.json"])
    with pytest.raises(ModelError, match=r"\(Dense\), and .* has no output sentence_embedding"):
        load_folder(folder)
