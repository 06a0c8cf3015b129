"""Adapters that peft has saved: the logits are peft's, on every device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf_files
import lora_zoo
import models_zoo
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from harness import Harness, device_ids, load, make_device
from optional_packages import require_packages

from tidewheel.engine.adapters.peft_folder import read_peft_folder
from tidewheel.engine.devices.limits import LoraLimits
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models import describe
from tidewheel.engine.weights import open_source, read_config
from tidewheel.engine.weights.dummy import DummySource

require_packages("peft")

TOKENS = models_zoo.prompts(8)[7]
_DEVICES = device_ids()
_PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
# Without a gate, with inputs that are weighed, with a clipped SwiGLU; beside shared ones, and called otherwise.
_MIXTURES = ["qwen2-moe", "mixtral", "gpt-oss", "llama4", "nemotron-h-experts"]
_MORE_MIXTURES = [
    "qwen3-moe", "olmoe", "hunyuan-moe", "ernie4-5-moe", "glm4-moe", "deepseek-v2", "deepseek-v3", "glm4-moe-lite",
    "qwen3_next-experts", "qwen3_5-experts", "granitemoe", "granitemoehybrid-experts", "gemma4-experts", "lfm2-experts",
]  # fmt: skip
MODELS = [
    "llama-bias", "phi3-longrope", "gpt2-scaled", "falcon-one-norm", "minicpm3", "qwen3_5", "qwen3_next", "mamba2",
    "granitemoehybrid", "lfm2", *_MIXTURES, *_MORE_MIXTURES,
]  # fmt: skip
# Torch computes each kind of layer that an adapter changes.
_CHOSEN = {
    "torch": ("gpt2-scaled", "minicpm3", "qwen3_5", "mamba2", "lfm2", "gpt-oss"),
    "graph": ("minicpm3", "qwen3_5"),
}
# Adapters of these change experts, which graph devices compute without adapters.
_OF_EXPERTS = (*_MIXTURES, *_MORE_MIXTURES)
# Latents are expanded head by head, which adapters cannot change. Peft refuses the other linear layer of a Mamba2, and
# makes parameters of a Qwen3-Next's MLPs, which could be experts. With the names that experts once had, it finds their
# parameters in some families.
_FIELDS: dict[str, dict[str, Any]] = {
    "minicpm3": {"target_modules": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "up_proj")},
    "mamba2": {"target_modules": ("in_proj",)},
    "qwen3_next": {"target_modules": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "v_proj")},
    "mixtral": {"target_modules": ("w1", "w2", "w3", "gate")},
    "gpt-oss": {"target_modules": ("q_proj",), "target_parameters": (*_PARAMETERS, "router.weight")},
    "llama4": {"target_modules": ("q_proj", "shared_expert.up_proj"), "target_parameters": _PARAMETERS},
    "nemotron-h-experts": {
        "target_modules": ("q_proj",),
        "target_parameters": ("experts.up_proj", "experts.down_proj", "gate.weight"),
    },
    "deepseek-v2": {"target_modules": ("o_proj",), "target_parameters": (*_PARAMETERS, "gate.weight")},
    "deepseek-v3": {"target_modules": ("o_proj",), "target_parameters": ("down_proj",)},
    "glm4-moe-lite": {"target_modules": ("o_proj",), "target_parameters": ("gate_up_proj",)},
    "qwen3_next-experts": {
        "target_modules": ("q_proj", "shared_expert_gate"),
        "target_parameters": (*_PARAMETERS, "gate.weight"),
    },
    "qwen3_5-experts": {
        "target_modules": ("shared_expert.up_proj", "shared_expert_gate"),
        "target_parameters": (*_PARAMETERS, "gate.weight"),
    },
    "granitemoe": {"target_modules": ("q_proj",), "target_parameters": (*_PARAMETERS, "router.weight")},
    "granitemoehybrid-experts": {
        "target_modules": ("input_linear", "output_linear"),
        "target_parameters": (*_PARAMETERS, "router.weight"),
    },
    "gemma4-experts": {"target_modules": ("proj", "up_proj"), "target_parameters": _PARAMETERS},
    "lfm2-experts": {"target_parameters": (*_PARAMETERS, "gate.weight")},
}


@functools.cache
def harness(device: str, model: str) -> Harness:
    limits = LoraLimits(max_loras=4, max_rank=16, dtype="float32")
    return Harness(load(make_device(device), models_zoo.folder(model), lora=limits))


def loaded(device: str, model: str, number: int, seed: int = 0, **fields: Any) -> Harness:
    description = describe(read_config(models_zoo.folder(model)), None)
    running = harness(device, model)
    base = open_source(str(models_zoo.folder(model))).weights(description)
    running.executor.load_lora(number, read_peft_folder(lora_zoo.folder(model, seed, **fields), description, 16, base))
    return running


def check(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("device", "model"),
    [
        pytest.param(
            device,
            model,
            marks=pytest.mark.sweep if model in _MORE_MIXTURES or model not in _CHOSEN.get(device, MODELS) else (),
        )
        for device in (*_DEVICES[:2], "graph")
        for model in MODELS
        if device != "graph" or model not in _OF_EXPERTS
    ],
)
def test_an_adapter_computes_what_peft_does(device: str, model: str) -> None:
    fields = _FIELDS.get(model, {})
    found = loaded(device, model, 0, **fields).logits(TOKENS, adapter=0)
    check(found, lora_zoo.logits(model, TOKENS, **fields))
    assert np.abs(found - models_zoo.reference_logits(model, TOKENS)).max() > 0.1


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("llama", {"target_modules": ("embed_tokens", "lm_head", "q_proj"), "use_rslora": True}),
        ("llama", {"target_modules": ("v_proj",), "modules_to_save": ("embed_tokens", "lm_head")}),
        ("llama-tied", {"target_modules": ("embed_tokens",)}),
        ("llama-tied", {"target_modules": ("lm_head",)}),
        ("llama-tied", {"target_modules": ("embed_tokens", "up_proj"), "ensure_weight_tying": True}),
        ("llama-tied", {"target_modules": ("v_proj",), "modules_to_save": ("embed_tokens",)}),
        ("llama-tied", {"target_modules": ("v_proj",), "modules_to_save": ("lm_head",)}),
        (
            "llama-tied",
            {"target_modules": ("v_proj",), "modules_to_save": ("embed_tokens",), "ensure_weight_tying": True},
        ),
        ("gemma2", {"target_modules": ("embed_tokens",), "modules_to_save": ("lm_head",)}),
        ("gpt2-scaled", {"target_modules": ("wte", "lm_head")}),
        ("granite", {"target_modules": ("embed_tokens", "lm_head")}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "device",
    [pytest.param("torch", marks=pytest.mark.sweep), _DEVICES[1], pytest.param("graph", marks=pytest.mark.sweep)],
)
def test_embeddings_and_heads_may_change(device: str, model: str, fields: dict[str, Any]) -> None:
    if device == "graph" and ("modules_to_save" in fields or fields.get("ensure_weight_tying")):
        with pytest.raises(DeviceError, match=r"this adapter has its own .* no room: take --device cpu"):
            loaded(device, model, 2, 3, **fields)
        return
    running = loaded(device, model, 2, 3, **fields)
    found = running.logits(TOKENS, adapter=2)
    check(found, lora_zoo.logits(model, TOKENS, 3, **fields))
    assert np.abs(found - running.logits(TOKENS)).max() > 0.05


@pytest.mark.parametrize("device", _DEVICES[1:])
def test_every_level_computes_the_merged_model(device: str) -> None:
    check(loaded(device, "llama", 0).logits(TOKENS, adapter=0), lora_zoo.logits("llama", TOKENS, merged=True))


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.01), ("float16", 0.002)])
@pytest.mark.parametrize("device", _DEVICES[1:])
def test_adapters_of_16_bits_change_logits_by_what_rounding_allows(device: str, dtype: str, share: float) -> None:
    limits = LoraLimits(max_loras=1, max_rank=16, dtype=dtype)
    running = Harness(load(make_device(device), models_zoo.folder("qwen3_next"), lora=limits))
    fields = _FIELDS["qwen3_next"]
    description = describe(read_config(models_zoo.folder("qwen3_next")), None)
    running.executor.load_lora(0, read_peft_folder(lora_zoo.folder("qwen3_next", 0, **fields), description, 16))
    found, expected = running.logits(TOKENS, adapter=0), lora_zoo.logits("qwen3_next", TOKENS, **fields)
    assert np.abs(found - expected).mean() < share * np.abs(expected - running.logits(TOKENS)).mean()


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ("q_proj", "v_proj")},
        {"target_modules": r".*\.1\.mlp\.(up|gate)_proj"},
        {"use_rslora": True, "lora_bias": True},
        {"rank_pattern": {"down_proj": 3, "0.self_attn.o_proj": 9}, "alpha_pattern": {r"1\..*q_proj": 4, "up_proj": 1}},
    ],
    ids=["names", "regex", "rslora-bias", "patterns"],
)
def test_a_config_says_how_large_updates_are(fields: dict[str, Any]) -> None:
    best = _DEVICES[1]
    check(loaded(best, "llama", 1, **fields).logits(TOKENS, adapter=1), lora_zoo.logits("llama", TOKENS, **fields))


@pytest.mark.parametrize("quantize", [gguf_files.as_float32, gguf_files.quantized(GGMLQuantizationType.Q8_0)])
def test_the_base_may_be_a_gguf_file(quantize: gguf_files.Quantize, tmp_path: Path) -> None:
    file = gguf_files.zoo_file(tmp_path / "llama.gguf", "llama", quantize)
    running = Harness(
        load(make_device(_DEVICES[1]), str(file), lora=LoraLimits(max_loras=1, max_rank=16, dtype="float32"))
    )
    description = describe(read_config(models_zoo.folder("llama")), None)
    running.executor.load_lora(0, read_peft_folder(lora_zoo.folder("llama", 0), description, 16))
    found = running.logits(TOKENS, adapter=0)
    expected = lora_zoo.logits("llama", TOKENS)
    if quantize is gguf_files.as_float32:
        check(found, expected)
    # Weights of 8 bits change logits by a small part of what the adapter does.
    assert np.abs(found - expected).mean() < 0.1 * np.abs(expected - running.logits(TOKENS)).mean()


@pytest.mark.parametrize("model", ["llama", "qwen2-moe", "gpt-oss"])
def test_a_token_gets_the_same_bits_in_any_company(model: str) -> None:
    best = _DEVICES[1]
    for number in range(3):
        running = loaded(best, model, number, seed=number, **_FIELDS.get(model, {}))
    alone = {number: running.logits(TOKENS, adapter=number) for number in (-1, 0, 1, 2)}
    for number, logits in alone.items():
        assert (running.logits(TOKENS, chunk=5, adapter=number) == logits).all()
    sequences = [running.start(TOKENS, 4, number) for number in (2, -1, 0, 1, 0, -1, 2)]
    for _ in range(4):
        running.step(sequences)
    for sequence in sequences:
        running.finish(sequence)
        assert (sequence.logits[0] == alone[sequence.adapter][-1]).all()
        lone = running.start(TOKENS, 4, sequence.adapter)
        for _ in range(4):
            running.step([lone])
        running.finish(lone)
        assert lone.tokens == sequence.tokens
        assert all((a == b).all() for a, b in zip(lone.logits, sequence.logits, strict=True))


@pytest.mark.parametrize("model", ["llama", "qwen2-moe"])
def test_rows_without_an_adapter_have_the_bits_of_a_model_without_adapters(model: str) -> None:
    best = _DEVICES[1]
    plain = Harness(load(make_device(best), models_zoo.folder(model))).logits(TOKENS)
    running = loaded(best, model, 0)
    assert (running.logits(TOKENS) == plain).all()
    beside = [running.start(TOKENS, 1, -1), running.start(TOKENS, 1, 0)]
    running.step(beside)
    assert (beside[0].logits[0] == plain[-1]).all()


def test_a_saved_matrix_of_the_model_is_left_out_where_it_is_the_same() -> None:
    folder = lora_zoo.folder("llama-tied", 3, target_modules=("embed_tokens",))
    source = open_source(str(models_zoo.folder("llama-tied")))
    description = describe(source.config, None)
    weights = source.weights(description)
    assert not read_peft_folder(folder, description, 16, weights).matrices
    other = DummySource(source, seed=1).weights(description)
    # What is not trained is the model's weight, and so both of what is tied.
    assert read_peft_folder(folder, description, 16, other).matrices.keys() == {"embed", "head"}
