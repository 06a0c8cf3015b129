"""Which models are encoders, by their small files: these are served without a chat model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from fake_hub import COMMITS, fake_hub, with_hub

from tidewheel.engine.encoders.detection import is_pooling_model
from tidewheel.engine.errors import ModelError


@pytest.mark.parametrize(
    ("pools", "architecture", "files"),
    [
        (True, "BertModel", {}),
        (True, "XLMRobertaForSequenceClassification", {}),
        (True, "ImaginaryForTokenClassification", {}),
        (True, "Qwen2ForRewardModel", {}),
        (True, "Qwen3ForCausalLM", {"modules.json": []}),
        (True, "MistralModel", {}),
        (True, "ImaginaryModel", {"model.onnx": {}}),
        (False, "ImaginaryForCausalLM", {"model.onnx": {}}),
        (False, "Qwen3ForCausalLM", {}),
        (False, "ImaginaryModel", {}),
    ],
)
def test_a_folder(tmp_path: Path, pools: bool, architecture: str, files: dict[str, Any]) -> None:
    for name, content in {"config.json": {"architectures": [architecture]}, **files}.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert is_pooling_model(str(tmp_path)) == pools


@pytest.mark.parametrize(
    ("pools", "architecture", "pooling"),
    [
        (True, "bert", None),
        (True, "qwen3", 3),
        (False, "qwen3", 0),
        (False, "qwen3", [3]),
        (False, [1], None),
        (False, "llama", None),
    ],
)
def test_a_gguf_file(
    tmp_path: Path, pools: bool, architecture: str | list[int], pooling: int | list[int] | None
) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture if isinstance(architecture, str) else "")
    if isinstance(architecture, list):
        writer.kv_data[0]["general.architecture"] = gguf.GGUFValue(architecture, gguf.GGUFValueType.ARRAY)
    if isinstance(pooling, list):
        writer.add_array(f"{architecture}.pooling_type", pooling)
    elif pooling is not None:
        writer.add_uint32(f"{architecture}.pooling_type", pooling)
    writer.add_token_list(["a"] * 1000)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert is_pooling_model(str(path)) == is_pooling_model(str(tmp_path)) == pools
    path.write_bytes(path.read_bytes()[:40])
    assert not is_pooling_model(str(path))  # what loads it says what is wrong


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="/no/such/folder does not exist"):
        is_pooling_model("/no/such/folder")


def test_a_hub_id_whatever_the_cache_holds_of_it(tmp_path: Path) -> None:
    config = b'{"architectures": ["ImaginaryModel"]}'
    repositories = {
        "own/graph": {"config.json": config, "onnx/model.onnx": b""},
        "own/plain": {"config.json": config},
        "own/gguf": {"a-Q8_0.gguf": b""},
    }
    with fake_hub(repositories) as hub, with_hub(hub.endpoint, tmp_path):
        for _ in range(2):
            assert is_pooling_model("own/graph")
            assert not is_pooling_model("own/graph:Q8_0")
            assert not is_pooling_model("own/plain")
            assert not is_pooling_model("own/gguf")
            for name in ("plain", "gguf"):  # of another use of it
                snapshot = tmp_path / f"hub/models--own--{name}/snapshots/{COMMITS['main']}"
                snapshot.mkdir(parents=True, exist_ok=True)
                writer = gguf.GGUFWriter(snapshot / "model.onnx", "bert")
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.close()
                (snapshot / "b.gguf").write_bytes((snapshot / "model.onnx").read_bytes())
