"""Reading a model folder, and the errors for folders that are wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import encoder_zoo as zoo
import pytest

from tidewheel.engine.encoders.classification import activation_of, labels_of
from tidewheel.engine.encoders.description import describe_encoder
from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.errors import DeviceError, ModelError


def test_pooling_flags_and_modes() -> None:
    assert describe_encoder(zoo.folder("bert")).pooling == ("mean",)
    assert describe_encoder(zoo.folder("roberta-cls")).pooling == ("cls",)
    assert describe_encoder(zoo.folder("mpnet-plain")).pooling == ("mean",)
    every = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    assert describe_encoder(zoo.folder("distilbert-all")).pooling == every
    assert describe_encoder(zoo.folder("bert")).normalize
    assert not describe_encoder(zoo.folder("roberta-cls")).normalize
    assert not describe_encoder(zoo.folder("bert-instructor")).pools_prompt
    assert describe_encoder(zoo.folder("bert-dense")).foreign_modules == ("Dense",)


@pytest.mark.parametrize(
    ("name", "files", "length"),
    [
        ("bert", {}, 64),
        ("bert", {"sentence_bert_config": {"max_seq_length": 4096}}, 96),  # there are no more positions
        ("bert", {"sentence_bert_config": {}}, 96),
        ("bert", {"sentence_bert_config": None, "tokenizer_config": {"model_max_length": 50}}, 50),
        ("bert", {"tokenizer_config": {"model_max_length": 10**30}}, 64),
        ("roberta-cls", {}, 94),  # positions start after the padding token's id
    ],
)
def test_the_longest_input(name: str, files: dict[str, Any], length: int, tmp_path: Path) -> None:
    assert describe_encoder(zoo.changed(name, tmp_path / "model", **files)).max_length == length


@pytest.mark.parametrize(
    ("name", "settings", "activation"),
    [
        ("bert-cross", {}, "sigmoid"),
        ("bert-cross", {"activation_fn": "torch.nn.modules.linear.Identity"}, None),
        ("roberta-cross", None, None),
    ],
)
def test_activations(name: str, settings: dict[str, Any] | None, activation: str | None, tmp_path: Path) -> None:
    files = {} if settings is None else {"config_sentence_transformers": settings}
    description = describe_encoder(zoo.changed(name, tmp_path / "model", **files))
    assert (description.task, description.labels) == ("classify", ("LABEL_0",))
    assert description.activation == activation


IDENTITY = {"activation_fn": "torch.nn.modules.linear.Identity"}


@pytest.mark.parametrize(
    ("num_labels", "config", "activation"),
    [
        (1, {}, "sigmoid"),
        (1, {"problem_type": "regression"}, None),
        (1, {"problem_type": "single_label_classification"}, "sigmoid"),
        (1, {"problem_type": "regression", "sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, "sigmoid"),
        (3, {}, "softmax"),
        (3, {"sentence_transformers": IDENTITY}, "softmax"),
        (3, {"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, "sigmoid"),
        (3, {"problem_type": "multi_label_classification"}, "sigmoid"),
        (3, {"problem_type": "regression"}, None),
    ],
)
def test_what_makes_probabilities(num_labels: int, config: dict[str, Any], activation: str | None) -> None:
    path = Path("config.json")
    assert activation_of(path, config, path, {}, num_labels=num_labels) == activation


def test_labels_are_in_the_order_of_their_numbers() -> None:
    path = Path("config.json")
    assert labels_of(path, {"id2label": {"10": "k", **{str(i): f"l{i}" for i in range(10)}}})[10] == "k"
    assert labels_of(path, {}) == ("LABEL_0", "LABEL_1")
    for config in ({"id2label": {"1": "a"}}, {"id2label": {"a": "a"}}, {"num_labels": 10**9}, {"num_labels": "2"}):
        with pytest.raises(ModelError, match=r"id2label must be|num_labels must be"):
            labels_of(path, config)


BERT = {"architectures": ["BertModel"], "model_type": "bert"}
RANKER = {"architectures": ["BertForSequenceClassification"], "max_position_embeddings": 96}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config": None}, "config.json"),
        ({"config": "{"}, "config.json is not valid JSON"),
        ({"modules": {}}, "must hold a JSON array"),
        ({"modules": ["Transformer"]}, "does not name the module's type"),
        ({"modules": [{"type": "a.StaticEmbedding"}]}, "StaticEmbedding"),
        ({"1_Pooling__config": None}, "1_Pooling/config.json does not exist"),
        ({"1_Pooling__config": {"pooling_mode": "median"}}, "'median' is not known; known are cls, max, mean"),
        ({"1_Pooling__config": {"pooling_mode": [["mean"]]}}, "['mean'] is not known"),
        ({"1_Pooling__config": {"pooling_mode": 1}}, "1 is not known"),
        ({"tokenizer": None}, "has no tokenizer.json"),
        ({"tokenizer": {}}, "tokenizer.json is not a tokenizer"),
        ({"config": BERT, "sentence_bert_config": {}}, "max_seq_length"),
        ({"config_sentence_transformers": {"prompts": []}, "config": BERT}, None),
        ({"config_sentence_transformers": {"prompts": [1]}}, "prompts must be an object"),
        ({"config_sentence_transformers": {"default_prompt_name": "query"}}, "default prompt 'query'"),
        ({"config_sentence_transformers": {"model_type": "MultiVectorEncoder"}}, "is a 'MultiVectorEncoder'"),
        (
            {"config_sentence_transformers": {"model_type": "SparseEncoder"}},
            "a model for sparse, which needs safetensors",
        ),
        ({"config": {**RANKER, "id2label": {"1": "a", "2": "b"}}}, "the keys of id2label must be"),
        (
            {"config": {**RANKER, "num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}},
            "'torch.nn.Tanh'; known are Identity, Sigmoid, Softmax",
        ),
        (
            {
                "config": {**RANKER, "num_labels": 1},
                "config_sentence_transformers": {"default_prompt_name": "a", "prompts": {"a": "b"}},
            },
            "default prompt",
        ),
    ],
)
def test_folders_that_cannot_be_served_say_why(files: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    folder = zoo.changed("bert", tmp_path / "model", **files)
    if said is None:
        load_encoders([str(folder)])
        return
    with pytest.raises(ModelError) as refused:
        load_encoders([str(folder)])
    assert said in str(refused.value)


def test_a_folder_without_a_graph_says_how_to_make_one(tmp_path: Path) -> None:
    folder = zoo.changed("bert", tmp_path / "model")
    (folder / "onnx" / "model.onnx").unlink()
    with pytest.raises(ModelError, match=r"no onnx/model.onnx.*backend='onnx'"):
        describe_encoder(folder)


def test_files_that_would_keep_a_start_waiting_or_lack_their_content_are_refused(tmp_path: Path) -> None:
    folder = zoo.changed("bert", tmp_path / "model")
    beside = folder / "onnx" / "model.onnx_data"
    os.mkfifo(beside)
    with pytest.raises(ModelError, match=r"model\.onnx_data is a named pipe"):
        load_encoders([str(folder)])
    beside.unlink()
    beside.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match=r"model\.onnx_data is a pointer of Git LFS"):
        load_encoders([str(folder)])
    beside.unlink()
    for name in ("tokenizer.json", "onnx/model.onnx", "config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(ModelError, match=rf"{name} is a named pipe"):
            load_encoders([str(folder)])


def test_without_onnxruntime_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(DeviceError, match=r"pip install 'onnxruntime>="):
        load_encoders([str(zoo.folder("bert"))])
