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
from tidewheel.engine.weights.hub import resolve


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


def gguf_bytes(path: Path, architecture: str, pooling: int | None = None) -> bytes:
    """A GGUF file, with as many bytes behind its own keys as those of a large tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    if pooling is not None:
        writer.add_uint32(f"{architecture}.pooling_type", pooling)
    writer.add_token_list(["tide"] * 2**17)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path.read_bytes()


def test_a_hub_id_whatever_the_cache_holds_of_it(tmp_path: Path) -> None:
    config, encoder = b'{"architectures": ["ImaginaryModel"]}', gguf_bytes(tmp_path / "made", "bert")
    repositories = {"own/graph": {"config.json": config, "onnx/model.onnx": b""}, "own/plain": {"config.json": config}}
    with fake_hub(repositories) as hub, with_hub(hub.endpoint, tmp_path):
        for _ in range(2):
            assert is_pooling_model("own/graph")
            assert not is_pooling_model("own/graph:Q8_0")
            assert not is_pooling_model("own/plain")
            snapshot = tmp_path / f"hub/models--own--plain/snapshots/{COMMITS['main']}"
            snapshot.mkdir(parents=True, exist_ok=True)
            for name in ("model.onnx", "b.gguf"):  # of another use of it
                (snapshot / name).write_bytes(encoder)


def test_a_gguf_file_of_the_hub_by_its_beginning(tmp_path: Path) -> None:
    files = {
        "embed-Q8_0.gguf": gguf_bytes(tmp_path / "embed", "qwen3", 3),
        "chat-Q4_K_M.gguf": gguf_bytes(tmp_path / "chat", "qwen3"),
        "empty-Q2_K.gguf": b"",
    }
    repositories = {"own/both": files, "own/bert": {"x-F16.gguf": gguf_bytes(tmp_path / "bert", "bert")}}
    with fake_hub(repositories) as hub, with_hub(hub.endpoint, tmp_path):
        assert is_pooling_model("own/both:Q8_0")
        assert is_pooling_model("own/bert")
        assert not any(is_pooling_model(f"own/both{which}") for which in ("", ":Q4_K_M", ":Q2_K", ":Q6_K"))
        assert hub.sent["embed-Q8_0.gguf"] == 2**18 < len(files["embed-Q8_0.gguf"])
        resolve("own/both:Q8_0")
    with with_hub("http://127.0.0.1:9", tmp_path, offline=True):  # from the cache
        assert is_pooling_model("own/both:Q8_0")
