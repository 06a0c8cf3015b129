"""Adapters with biases of their own, as peft trains them with `bias` of `lora_only` and `all`: logits are peft's."""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path
from typing import Any

import lora_files
import lora_zoo
import models_zoo
import numpy as np
import pytest
from harness import Harness, device_ids, load, make_device
from optional_packages import require_packages
from safetensors.numpy import load_file, save_file

from tidewheel.engine.adapters.peft_folder import WEIGHTS, read_peft_folder
from tidewheel.engine.devices.limits import LoraLimits
from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.lora import LoraAdapter

require_packages("peft")

TOKENS = models_zoo.prompts(8)[7]
_DEVICES = device_ids()
_BEST = _DEVICES[1]
_GPT2 = {"bias": "all", "target_modules": ("c_fc",)}
_FC = "base_model.model.transformer.h.0.mlp.c_fc.base_layer.bias"
_NORM = "base_model.model.transformer.h.1.ln_2.bias"
_TARGETS = {"qwen2": ("q_proj", "down_proj"), "gpt2-scaled": ("c_attn", "c_fc")}
# Fused and split rows, transposed weights, a head with a bias, and experts with a router beside them.
_CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"bias": "lora_only", "target_modules": ("q_proj", "up_proj")}),
    ("qwen2", {"bias": "all", "target_modules": ("down_proj",)}),
    ("gpt2-scaled", {"bias": "lora_only"}),
    ("gpt2-scaled", {"bias": "all", "target_modules": ("c_fc",)}),
    ("starcoder2", {"bias": "all", "target_modules": ("k_proj", "c_proj"), "lora_bias": True}),
    ("llama-bias", {"bias": "all", "use_rslora": True, "target_modules": ("gate_proj", "v_proj", "o_proj")}),
    ("phi", {"bias": "all", "target_modules": ("dense",)}),
    ("qwen2-moe", {"bias": "all", "target_modules": ("q_proj",)}),
]
_ON_TORCH = _CASES[3]


def read(model: str, folder: Path) -> LoraAdapter:
    source = open_source(str(models_zoo.folder(model)))
    description = describe(source.config, None)
    return read_peft_folder(folder, description, 16, source.weights(description))


@functools.cache
def harness(device: str, model: str, threads: str | None = None) -> Harness:
    limits = LoraLimits(max_loras=4, max_rank=16, dtype="float32")
    return Harness(load(make_device(device, threads), models_zoo.folder(model), lora=limits))


def loaded(device: str, model: str, number: int, folder: Path, threads: str | None = None) -> Harness:
    running = harness(device, model, threads)
    running.executor.load_lora(number, read(model, folder))
    return running


def check(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "model", "fields"),
    [
        *((_BEST, model, fields) for model, fields in _CASES),
        *(
            pytest.param("torch", model, fields, marks=() if (model, fields) == _ON_TORCH else pytest.mark.sweep)
            for model, fields in _CASES
        ),
    ],
    ids=str,
)
def test_biases_replace_those_of_the_model(device: str, model: str, fields: dict[str, Any]) -> None:
    folder = lora_zoo.folder(model, **fields)
    assert any(name.endswith("bias") and "lora_" not in name for name in load_file(folder / WEIGHTS))
    running = loaded(device, model, 0, folder)
    found = running.logits(TOKENS, adapter=0)
    check(found, lora_zoo.logits(model, TOKENS, **fields))
    check(found, lora_zoo.logits(model, TOKENS, merged=True, **fields))
    without = {**fields, "bias": "none"}
    assert np.abs(found - lora_zoo.logits(model, TOKENS, **without)).max() > 0.1
    sequence = running.start(TOKENS, 6, 0)
    for _ in range(6):
        running.step([sequence])
    running.finish(sequence)
    assert sequence.output == lora_zoo.greedy(model, TOKENS, 6, **fields)


# Three executors with two adapters each, and threads that wait for each other.
@pytest.mark.parametrize("model", ["qwen2", "gpt2-scaled"])
def test_a_token_gets_the_same_bits_in_any_company_on_any_threads(model: str) -> None:
    cases = [{"bias": "all", "target_modules": (name,)} for name in _TARGETS[model]]
    logits = {}
    for threads in ("0", "0,1", "0|1"):
        for number, fields in enumerate(cases):
            running = loaded(_BEST, model, number, lora_zoo.folder(model, number, **fields), threads)
        sequences = [running.start(TOKENS, 3, number) for number in (1, -1, 0, 1, -1, 0)]
        for _ in range(3):
            running.step(sequences)
        for sequence in sequences:
            running.finish(sequence)
        for number in (-1, 0, 1):
            alone = running.start(TOKENS, 3, number)
            for _ in range(3):
                running.step([alone], chunk=5 if alone.cached < len(TOKENS) else 2048)
            running.finish(alone)
        for number in (-1, 0, 1):
            found = running.logits(TOKENS, adapter=number)
            assert (running.logits(TOKENS, chunk=5, adapter=number) == found).all()
            assert (logits.setdefault(number, found) == found).all()
        for sequence in sequences:
            assert (sequence.logits[0] == logits[sequence.adapter][-1]).all()
    plain = Harness(load(make_device(_BEST), models_zoo.folder(model))).logits(TOKENS)
    assert (logits[-1] == plain).all()


def test_a_layer_without_a_bias_may_get_one(tmp_path: Path) -> None:
    import torch

    model = copy.deepcopy(models_zoo.model("llama"))
    layer = model.model.layers[1].self_attn.k_proj
    assert layer.bias is None
    layer.bias = torch.nn.Parameter(torch.randn(layer.out_features, generator=torch.Generator().manual_seed(0)))
    name = "base_model.model.model.layers.1.self_attn.k_proj.bias"
    folder = lora_files.write(tmp_path, {name: layer.bias.detach().numpy()}, bias="all")
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    for device in _DEVICES[:2]:
        running = loaded(device, "llama", 3, folder)
        check(running.logits(TOKENS, adapter=3), expected)
        assert np.abs(running.logits(TOKENS) - expected).max() > 0.05


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            _NORM,
            lambda bias: bias + 1,
            ["h.1.ln_2.bias", "differs from the model's own", "norms", "lora_only", "merge"],
        ),
        (_FC, lambda bias: bias[:-1], ["h.0.mlp.c_fc.bias", "shape (151,)"]),
        (_FC, lambda bias: bias[None], ["h.0.mlp.c_fc.bias", "shape (1, 152)"]),
        (_FC, lambda bias: bias * np.nan, ["h.0.mlp.c_fc.bias", "not finite"]),
        (_FC.replace("h.0", "h.9"), lambda bias: bias, ["h.9", "cannot be changed"]),
        (_FC.replace("base_layer.", ""), lambda bias: bias, ["c_fc", "two biases"]),
    ],
)
def test_biases_that_cannot_be_an_adapters_are_refused(
    name: str, change: Any, words: list[str], tmp_path: Path
) -> None:
    folder = lora_zoo.folder("gpt2-scaled", **_GPT2)
    tensors = load_file(folder / WEIGHTS)
    tensors[name] = change(tensors.get(name, tensors[_FC]))
    (tmp_path / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ModelError) as failure:
        read("gpt2-scaled", tmp_path)
    for word in words:
        assert word in str(failure.value)


def test_a_file_that_has_lost_its_biases_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = lora_zoo.folder("gpt2-scaled", **_GPT2)
    tensors = {name: value for name, value in load_file(folder / WEIGHTS).items() if not name.endswith("bias")}
    (tmp_path / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    save_file(tensors, tmp_path / WEIGHTS)
    with caplog.at_level(logging.WARNING):
        found = read("gpt2-scaled", tmp_path)
    assert all(update.shift is None for update in found.updates)
    assert "the file has no bias of 'transformer.h.0.mlp.c_fc'" in caplog.text


def test_biases_that_equal_the_models_add_nothing(tmp_path: Path) -> None:
    found = read("gpt2-scaled", lora_zoo.folder("gpt2-scaled", **_GPT2))
    names = {update.name for update in found.updates if update.shift is not None}
    assert {"layers.0.q", "layers.0.k", "layers.0.v", "layers.0.o", "layers.0.up", "layers.0.down"} <= names
    folder = lora_zoo.folder("gpt2-scaled", bias="all", target_modules=("c_attn",), r=2)
    tensors = load_file(folder / WEIGHTS)
    own = {name: tensor.detach().numpy() for name, tensor in models_zoo.model("gpt2-scaled").state_dict().items()}
    for name in tensors:
        if name.endswith("bias"):
            tensors[name] = own[name.removeprefix("base_model.model.").replace("base_layer.", "")]
    (tmp_path / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    save_file(tensors, tmp_path / WEIGHTS)
    found = read("gpt2-scaled", tmp_path)
    assert {update.name.rpartition(".")[2] for update in found.updates} == {"q", "k", "v"}
    assert all(update.shift is None for update in found.updates)
