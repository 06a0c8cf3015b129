"""`tidewheel inspect` says of an encoder in ONNX what serving it does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoder_zoo
import pytest
from fake_hub import fake_hub, with_hub
from optional_packages import require_packages
from samples import sample

from tidewheel.engine.encoders.embedder import Embedder
from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.encoders.settings import EncoderSettings
from tidewheel.server.commands.cli import main

pytest.importorskip("onnxruntime")
require_packages("transformers")

Inspect = Callable[..., dict[str, Any]]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    def run(model: Path | str, *options: str, code: int = 0) -> dict[str, Any]:
        assert main(["inspect", str(model), "--json", *options]) == code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


@pytest.mark.parametrize("name", sample(encoder_zoo.CASES, ("bert-prompts", "roberta-cross").__contains__))
def test_it_says_what_is_served(inspect: Inspect, name: str) -> None:
    folder = encoder_zoo.folder(name)
    found = inspect(folder)
    served = load_encoders([str(folder)], ["it"]).encoders["it"]
    assert found["refusal"] is None
    assert found["architecture"] == type(encoder_zoo.model(name)).__name__
    assert found["files"] == [encoder_zoo.CASES[name].graph]
    assert found["bytes"] == (folder / encoder_zoo.CASES[name].graph).stat().st_size
    assert (found["max_length"], found["vocab_size"]) == (served.max_length, served.vocab_size)
    assert found["is_cross_encoder"] == served.is_cross_encoder
    assert tuple(found["labels"]) == served.labels
    assert {*found["tasks"]} <= served.tasks
    assert found["tasks"][0] == served.task
    if isinstance(served, Embedder):
        assert found["width"] == (None if found["in_graph"] else served.width)
        assert (found["prompts"], found["default_prompt_name"]) == (served.prompts, served.default_prompt_name)


def test_it_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        "bert-instructor": ("vectors of 32 numbers, the tokens' pooled by weightedmean\n", "the default is query"),
        "bert": ("pooled by mean, normalized", "BertModel (embedding model)", "yes, alone, or beside a chat model"),
        "bert-dense": ("the graph must contain the whole model, because Tidewheel does not compute Dense",),
        "bert-cross": ("BertForSequenceClassification (cross-encoder)", "a score of a query and a document, through a"),
        "roberta-cross": ("a score of a query and a document\n",),
        "bert-classes": ("(classifier)", "labels        calm, rough, stormy\n", "tasks         classify\n"),
    }
    for name, words in said.items():
        assert main(["inspect", str(encoder_zoo.folder(name))]) == 0
        printed = capsys.readouterr().out
        assert [word for word in words if word not in printed] == []


def test_the_memory_of_safetensors_is_said(
    inspect: Inspect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = encoder_zoo.native_folder("distilbert")
    found, served = inspect(folder), load_encoders([str(folder)], ["it"]).encoders["it"]
    assert (found["dtype"], str(found["memory_bytes"])) == (served.info["dtype"], served.info["weight_bytes"])
    assert {*found["tasks"]} == served.tasks
    small = inspect(folder, "--quantization", "int8", "--max-model-len", "16")
    settings = EncoderSettings(dtype="int8", max_length=16)
    served = load_encoders([str(folder)], ["it"], first=settings).encoders["it"]
    assert (small["dtype"], str(small["memory_bytes"])) == ("int8", served.info["weight_bytes"])
    assert small["max_length"] == served.max_length == 16
    assert "--quantization int4 is for models" in inspect(folder, "--quantization", "int4", code=1)["refusal"]
    config = json.loads((folder / "config.json").read_text())
    cut = encoder_zoo.changed_folder(folder, tmp_path / "cut", config={**config, "matryoshka_dimensions": [16, 8]})
    assert inspect(cut)["matryoshka"] == [8, 16]
    assert main(["inspect", str(cut)]) == 0
    assert "vectors may be cut to 8, 16 numbers" in capsys.readouterr().out


def test_of_a_hub_all_small_files_are_read(
    inspect: Inspect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = encoder_zoo.changed_folder(
        encoder_zoo.native_folder("distilbert"), tmp_path / "short", tokenizer_config={"model_max_length": 24}
    )
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "modules.json"
    }
    of_bge = {"config.json": files["config.json"], "onnx/model.onnx": b"graph", "sparse_linear.pt": b""}
    with fake_hub({"own/model": files, "own/bge": of_bge}) as hub, with_hub(hub.endpoint, tmp_path / "cache"):
        assert inspect("own/model")["max_length"] == 24
        assert hub.sent["tokenizer_config.json"]
        assert "tokenizer.json" not in hub.sent
        assert main(["inspect", "own/bge"]) != 0
        assert "PyTorch's files, which can only be inspected after" in capsys.readouterr().err


def test_a_refusal_is_that_of_serving(inspect: Inspect, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(encoder_zoo.folder("bert-cross"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"0": "a", "2": "b"}}))
    assert "the keys of id2label" in inspect(folder, code=1)["refusal"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in inspect(folder, code=1)["refusal"]


def test_a_model_that_generates_text_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ImaginaryForCausalLM"]}))
    (tmp_path / "model.onnx").write_bytes(b"graph")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "--embedding-model" not in capsys.readouterr().out
