"""Model sources: each part is read when it is asked for, and only then missed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.models.generation import GenerationConfig
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.weights import open_source

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64, "dtype": "float16",
    "eos_token_id": 3,
}  # fmt: skip
MODEL = describe(CONFIG)


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))


def write_tokenizer(folder: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def write_weights(folder: Path) -> None:
    shapes = tensor_shapes(MODEL.spec).items()
    save_file({MODEL.tensors[name].name: np.ones(shape, "f4") for name, shape in shapes}, folder / "model.safetensors")


def test_a_folder_is_all_of_a_model(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_tokenizer(tmp_path)
    write_weights(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    source = open_source(str(tmp_path))
    assert source.config == CONFIG
    assert source.generation() == GenerationConfig(eos_token_ids=(3,), top_k=7)
    assert source.generation().origin == str(tmp_path / "generation_config.json")
    assert source.tokenizer().encode("ab") == [0, 1]
    assert source.tokenizer().chat_template == "{{ messages }}"
    weights = source.weights(MODEL)
    assert weights.dtype == "float32"
    assert list(weights) == list(tensor_shapes(MODEL.spec))


def test_a_part_is_missed_when_it_is_asked_for(tmp_path: Path) -> None:
    write_config(tmp_path)
    source = open_source(str(tmp_path))
    assert source.config == CONFIG
    assert source.generation() == GenerationConfig(eos_token_ids=(3,))
    with pytest.raises(ModelError, match="has no tokenizer"):
        source.tokenizer()
    with pytest.raises(ModelError, match="has no weights"):
        source.weights(MODEL)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_folder_may_be_nothing_but_a_tokenizer(tmp_path: Path, load_format: str) -> None:
    write_tokenizer(tmp_path)
    source = open_source(str(tmp_path), load_format=load_format)
    assert source.tokenizer().encode("ba") == [1, 0]
    with pytest.raises(ModelError, match=r"has no config\.json"):
        source.config  # noqa: B018


def test_dummy_weights_are_of_a_folder_that_has_none(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_tokenizer(tmp_path)
    source = open_source(str(tmp_path), load_format="dummy", seed=3)
    assert source.config == CONFIG
    assert source.generation() == GenerationConfig(eos_token_ids=(3,))
    assert source.generation({**CONFIG, "eos_token_id": [1, 2]}) == GenerationConfig(eos_token_ids=(1, 2))
    assert source.tokenizer().encode("ab") == [0, 1]
    weights = source.weights(MODEL)
    assert weights.dtype == "float16"
    assert {name: weights[name].data.shape for name in weights} == tensor_shapes(MODEL.spec)


def test_mistrals_own_files_alone_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has Mistral's params.json and no config.json: name a repository"):
        open_source(str(tmp_path)).config  # noqa: B018


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 2471645608\n".format("4d7a" * 16)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "pytorch_model.bin",
        "model-00001-of-00002.gguf",
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
    ],
)
def test_a_pointer_of_git_lfs_is_said_to_be_one(tmp_path: Path, name: str) -> None:
    write_config(tmp_path)
    (tmp_path / name).write_text(POINTER)

    def read() -> None:
        source = open_source(str(tmp_path))
        if name.startswith(("model", "pytorch")):
            source.weights(MODEL)
        source.tokenizer()

    said = f"{tmp_path / name} is a pointer of Git LFS in place of the file.* run git lfs pull in {tmp_path}, or"
    with pytest.raises(ModelError, match=said):
        read()
