"""Adapters in GGUF files compute what the same adapters compute that peft has saved."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import lora_zoo
import models_zoo
import numpy as np
import pytest
from harness import Harness, load, make_device
from optional_packages import require_packages

from tidewheel.engine.adapters.reading import read_adapter
from tidewheel.engine.devices.limits import LoraLimits
from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.weights import open_source

require_packages("peft")

TOKENS = models_zoo.prompts(8)[7]
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}  # fmt: skip


@functools.cache
def harness(model: str) -> Harness:
    return Harness(load(make_device("cpu"), Path(model), lora=LoraLimits(max_loras=2, max_rank=16, dtype="float32")))


def logits(model: str, adapter: Path, number: int = 0) -> Any:
    running = harness(model)
    source = open_source(model)
    description = describe(source.config, None)
    base = source.weights(description)
    found = read_adapter(adapter, description, 16, base=base, base_is_gguf=model.endswith(".gguf"))
    running.executor.load_lora(number, found)
    return running.logits(TOKENS, adapter=number)


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("llama", {}),
        ("phi3-longrope", {}),
        ("falcon-one-norm", {}),
        ("qwen3_5", {}),
        ("llama-tied", {"target_modules": ("embed_tokens", "lm_head", "k_proj")}),
    ],
    ids=str,
)
def test_a_file_has_the_bits_of_a_folder_over_either_kind_of_base(
    model: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = lora_zoo.folder(model, 1, **fields)
    (tmp_path / "adapter").mkdir()
    file = gguf_files.write_adapter(tmp_path / "adapter" / "any.gguf", models_zoo.model(model).config, folder)
    for base in (models_zoo.folder(model), gguf_files.zoo_file(tmp_path / "base.gguf", model)):
        found = logits(str(base), file)
        assert (found == logits(str(base), folder, 1)).all()
        np.testing.assert_allclose(found, lora_zoo.logits(model, TOKENS, 1, **fields), rtol=2e-3, atol=2e-3)
    assert (logits(str(base), file.parent) == found).all()


def test_matrices_may_be_in_any_type(tmp_path: Path) -> None:
    base, exact = str(models_zoo.folder("llama")), lora_zoo.logits("llama", TOKENS, 1)
    plain = np.abs(exact - models_zoo.reference_logits("llama", TOKENS)).mean()
    for kind in (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.Q8_0):
        config, folder = models_zoo.model("llama").config, lora_zoo.folder("llama", 1)
        file = gguf_files.write_adapter(tmp_path / f"{kind.name}.gguf", config, folder, kind)
        assert np.abs(logits(base, file) - exact).mean() < 0.02 * plain


def test_adapters_of_multiplied_models_need_a_base_of_their_kind(tmp_path: Path) -> None:
    folder = lora_zoo.folder("falcon-h1", target_modules=("q_proj",))
    file = gguf_files.write_adapter(tmp_path / "adapter.gguf", models_zoo.model("falcon-h1").config, folder)
    description = describe(open_source(str(models_zoo.folder("falcon-h1"))).config, None)
    read_adapter(folder, description, 16)
    read_adapter(file, description, 16, base_is_gguf=True)
    for path, base_is_gguf in ((file, False), (folder, True)):
        with pytest.raises(ModelError, match="FalconH1ForCausalLM need a model in their own form"):
            read_adapter(path, description, 16, base_is_gguf=base_is_gguf)


Q = "blk.0.attn_q.weight"
Change = Callable[[dict[str, Any], dict[str, Any]], Any]


def _tensor(name: str, *shape: int) -> Change:
    return lambda metadata, tensors: tensors.update({name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m, t: m.pop("general.type"), ["general.type must be adapter"]),
        (lambda m, t: m.update({"general.type": "model"}), ["general.type must be adapter", "model"]),
        (lambda m, t: m.update({"adapter.type": "dora"}), ["adapter.type must be lora", "dora"]),
        (lambda m, t: m.pop("adapter.lora.alpha"), ["adapter.lora.alpha must be a number"]),
        (lambda m, t: m.update({"adapter.lora.alpha": float("nan")}), ["adapter.lora.alpha must be a number"]),
        (lambda m, t: m.update({"adapter.alora.invocation_tokens": 1}), ["activated LoRA"]),
        (lambda m, t: m.update({"general.architecture": "qwen2"}), ["qwen2", "LlamaForCausalLM"]),
        (lambda m, t: m.update({"general.architecture": "nothing"}), ["nothing", "LlamaForCausalLM"]),
        (lambda m, t: t.pop(f"{Q}.lora_b"), [Q, "has no lora_b"]),
        (lambda m, t: t.pop(f"{Q}.lora_a"), [Q, "has no lora_a"]),
        (lambda m, t: t.clear(), ["has no tensors"]),
        (_tensor(f"{Q}.lora_a", 4, 63), [f"{Q}.lora_a", "do not fit the model"]),
        (_tensor(f"{Q}.lora_b", 63, 4), [f"{Q}.lora_b", "do not fit the model"]),
        (_tensor(f"{Q}.lora_b", 64, 5), [f"{Q}.lora_b", "do not fit the model"]),
        (_tensor("blk.0.attn_norm.weight", 64), ["blk.0.attn_norm.weight", "is not an A or B"]),
        (lambda m, t: t.update({f"{Q}.lora_a": np.full((4, 64), np.nan, np.float32)}), [f"{Q}.lora_a", "not finite"]),
        (
            lambda m, t: t.update({f"blk.7.attn_q.weight.lora_{p}": np.zeros((64, 64), np.float32) for p in "ab"}),
            ["blk.7.attn_q.weight", "cannot be changed"],
        ),
        (
            lambda m, t: t.update(
                {f"{Q}.lora_{p}": np.zeros(s, np.float32) for p, s in (("a", (17, 64)), ("b", (64, 17)))}
            ),
            ["rank 17", "--max-lora-rank 16"],
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_in_one_sentence(tmp_path: Path, change: Change, words: list[str]) -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0,
    }  # fmt: skip
    tensors = {f"{Q}.lora_a": np.zeros((4, 64), np.float32), f"{Q}.lora_b": np.zeros((64, 4), np.float32)}
    change(metadata, tensors)
    writer = gguf.GGUFWriter(tmp_path / "adapter.gguf", metadata.pop("general.architecture"))
    for key, value in metadata.items():
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](key, value)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    file = gguf_files.finish(writer)
    with pytest.raises(ModelError) as failure:
        read_adapter(file, describe(LLAMA), 16)
    assert all(word in str(failure.value) for word in [str(file), *words])
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((2**14 + 1, 0), "more than 16384 tensors"),
        ((0, 1), "metadata takes more than 4 MiB"),
    ],
)
def test_an_adapter_is_no_model(tmp_path: Path, counts: tuple[int, int], words: str) -> None:
    """All of what a file says of itself is read, so an adapter may say less than a model."""
    said = struct.pack("<4sIQQ", b"GGUF", 3, *counts) + struct.pack("<Q1sIQ", 1, b"a", 8, 2**24)
    (tmp_path / "adapter.gguf").write_bytes(said + b"a" * 2**24)
    with pytest.raises(ModelError, match=words):
        read_adapter(tmp_path / "adapter.gguf", describe(LLAMA), 16)


def test_a_folder_with_several_files_has_to_be_told_apart(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=r"several GGUF files \('a.gguf', 'b.gguf'\)"):
        read_adapter(tmp_path, describe(LLAMA), 16)
    with pytest.raises(ModelError, match=r"a\.gguf"):
        read_adapter(tmp_path / "a.gguf", describe(LLAMA), 16)
    with pytest.raises(ModelError, match=r"nowhere\.gguf"):
        read_adapter(tmp_path / "nowhere.gguf", describe(LLAMA), 16)
