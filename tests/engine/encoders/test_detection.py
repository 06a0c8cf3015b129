"""Which models are encoders, by their small files: these are served without a chat model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

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
    [(True, "bert", None), (True, "qwen3", 3), (False, "qwen3", 0), (False, "llama", None)],
)
def test_a_gguf_file(tmp_path: Path, pools: bool, architecture: str, pooling: int | None) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    if pooling is not None:
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
