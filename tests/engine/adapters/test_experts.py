"""Adapters of experts: matrix by matrix, as peft stacks them, and in GGUF files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import gguf_files
import lora_files
import lora_zoo
import models_zoo
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from harness import Harness, device_ids, load, make_device
from numpy.typing import NDArray
from optional_packages import require_packages
from safetensors.numpy import load_file

from tidewheel.engine.adapters.peft_folder import read_peft_folder
from tidewheel.engine.adapters.reading import changes_experts, read_adapter
from tidewheel.engine.devices.limits import LoraLimits
from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.weights import open_source, read_config
from tidewheel.engine.weights.lora import LoraAdapter
from tidewheel.engine.weights.quantization import Quantization

require_packages("peft")

TOKENS = models_zoo.prompts(8)[7]
EXPERTS, HIDDEN, SIZE = 8, 64, 48  # of the zoo's Qwen3 with experts
PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
LIMITS = LoraLimits(max_loras=4, max_rank=16, dtype="float32")
_TORCH, _BEST = device_ids()[:2]


def single_experts() -> dict[str, NDArray[np.float32]]:
    """An adapter of some matrices of some experts, of different ranks."""
    random, found = np.random.default_rng(5), {}
    for layer in range(2):
        for expert in (0, 2, 3, 7):
            for module in ("gate_proj", "up_proj", "down_proj")[expert % 2 :]:
                inputs, outputs = (SIZE, HIDDEN) if module == "down_proj" else (HIDDEN, SIZE)
                name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{module}.lora"
                rank = 1 + expert
                found[f"{name}_A.weight"] = random.standard_normal((rank, inputs)).astype(np.float32) / inputs**0.5
                found[f"{name}_B.weight"] = random.standard_normal((outputs, rank)).astype(np.float32) / rank**0.5
    return found


def merged_logits(content: dict[str, NDArray[np.float32]], alpha: float) -> NDArray[np.float32]:
    """What transformers computes with the products in its weights."""
    import torch

    model = copy.deepcopy(models_zoo.model("qwen3-moe"))
    with torch.no_grad():
        for key in [key for key in content if key.endswith("lora_A.weight")]:
            a, b = content[key], content["B".join(key.rsplit("A", 1))]
            layer, expert, module = key.split(".")[4], key.split(".")[7], key.split(".")[8]
            experts = model.model.layers[int(layer)].mlp.experts
            whole = experts.down_proj if module == "down_proj" else experts.gate_up_proj
            first = SIZE if module == "up_proj" else 0
            whole[int(expert), first : first + len(b)] += torch.from_numpy(alpha / len(a) * b @ a)
        found: NDArray[np.float32] = model(torch.tensor([TOKENS])).logits[0].numpy()
    return found


def running(model: str | Path, *adapters: Path, device: str = _BEST, **options: Any) -> Harness:
    """The model with these adapters by their place."""
    path = models_zoo.folder(model) if isinstance(model, str) else model
    made = Harness(load(make_device(device), path, lora=LIMITS, **options))
    source = open_source(str(path))
    description = describe(source.config, None)
    for number, adapter in enumerate(adapters):
        base = source.weights(description)
        made.executor.load_lora(number, read_adapter(adapter, description, 16, base=base))
    return made


def same(a: LoraAdapter, b: LoraAdapter) -> bool:
    """Whether both change the same, in any order."""
    named = ({update.name: update for update in adapter.updates} for adapter in (a, b))
    first, second = named
    return first.keys() == second.keys() and all(
        np.array_equal(one.a, second[name].a)
        and np.array_equal(one.b, second[name].b)
        and one.scale == second[name].scale
        for name, one in first.items()
    )


@pytest.mark.parametrize("device", [_TORCH, _BEST])
def test_each_expert_may_have_its_own_matrices(device: str, tmp_path: Path) -> None:
    content = single_experts()
    made = running("qwen3-moe", lora_files.write(tmp_path, content, lora_alpha=6), device=device)
    found = made.logits(TOKENS, adapter=0)
    np.testing.assert_allclose(found, merged_logits(content, 6), rtol=2e-3, atol=2e-3)
    assert np.abs(found - made.logits(TOKENS)).max() > 0.1


def unstacked(content: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """The tensors that peft saved for parameters of the zoo's Qwen3, with the names that experts once had."""
    found = {}
    for key in [key for key in content if key.endswith("lora_A.weight")]:
        a, b = content[key], content["B".join(key.rsplit("A", 1))]
        experts, _, around = key.partition(".mlp.experts.")
        if not around:
            found |= {key: a, "B".join(key.rsplit("A", 1)): b}
            continue
        modules = ("gate_proj", "up_proj") if around.startswith("base_layer") else ("down_proj",)
        for expert in range(EXPERTS):
            each = len(a) // EXPERTS
            for module, rows in zip(modules, np.split(b[:, expert::EXPERTS], len(modules)), strict=True):
                name = f"{experts}.mlp.experts.{expert}.{module}.lora"
                found[f"{name}_A.weight"] = a[expert * each : (expert + 1) * each].copy()
                found[f"{name}_B.weight"] = rows.copy()
    return found


def test_both_forms_and_gguf_files_compute_the_same_bits(tmp_path: Path) -> None:
    stacked = lora_zoo.folder("qwen3-moe", 1, target_modules=("q_proj",), target_parameters=PARAMETERS)
    content = unstacked(load_file(stacked / "adapter_model.safetensors"))
    single = lora_files.write(tmp_path / "single", content, lora_alpha=2 * lora_zoo.RANK)
    config = models_zoo.model("qwen3-moe").config
    file = gguf_files.write_adapter(tmp_path / "adapter.gguf", config, single)
    base = gguf_files.zoo_file(tmp_path / "base.gguf", "qwen3-moe")
    description = describe(read_config(models_zoo.folder("qwen3-moe")))
    assert all(changes_experts(adapter, description) for adapter in (stacked, single, file))
    for model in ("qwen3-moe", base):
        made = running(model, stacked, single, file)
        found = made.logits(TOKENS, adapter=0)
        fields = {"target_modules": ("q_proj",), "target_parameters": PARAMETERS}
        np.testing.assert_allclose(found, lora_zoo.logits("qwen3-moe", TOKENS, 1, **fields), rtol=2e-3, atol=2e-3)
        for number in (1, 2):
            assert (made.logits(TOKENS, adapter=number) == found).all()


@pytest.mark.parametrize("kind", ["int4-fast", "Q5_0", "unpacked"])
def test_bases_of_few_bits_and_those_left_in_files(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter adds the same to them as to floats, and its tokens have the same bits beside any others."""
    fields = {"target_modules": ("v_proj",), "target_parameters": PARAMETERS}
    stacked = lora_zoo.folder("olmoe", 1, **fields)
    model: str | Path = "olmoe"
    options: dict[str, Any] = {}
    if kind == "unpacked":
        monkeypatch.setenv("VLLM_CPU_MOE_PREPACK", "0")
    elif kind == "int4-fast":
        options["quantization"] = Quantization("int4-fast", group_size=32)
    else:
        quantize = gguf_files.quantized(GGMLQuantizationType.Q5_0)
        model = gguf_files.zoo_file(tmp_path / "olmoe.gguf", "olmoe", quantize)
    made = running(model, stacked, stacked, **options)
    with_adapter, without = (made.logits(TOKENS, adapter=number) for number in (0, -1))
    assert (made.logits(TOKENS, chunk=7, adapter=1) == with_adapter).all()
    sequences = [made.start(TOKENS[:20], 3, 1), made.start(TOKENS[:20], 3), made.start(TOKENS[:20], 3, 0)]
    for _ in range(3):
        made.step(sequences)
    assert (sequences[0].logits[0] == with_adapter[19]).all()
    assert (sequences[1].logits[0] == without[19]).all()
    assert all((a == b).all() for a, b in zip(sequences[0].logits, sequences[2].logits, strict=True))
    exact, plain = lora_zoo.logits("olmoe", TOKENS, 1, **fields), models_zoo.reference_logits("olmoe", TOKENS)
    if kind == "unpacked":
        np.testing.assert_allclose(with_adapter, exact, rtol=2e-3, atol=2e-3)
    else:  # about as far from it as the model is from the one with floats
        errors = np.abs(with_adapter - exact).mean(), np.abs(without - plain).mean()
        assert errors[0] < 2 * errors[1] < np.abs(exact - plain).mean()


OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "rms_norm_eps": 1e-5, "num_experts": 4,
    "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip


def swapped(content: dict[str, NDArray[np.float32]], experts: int) -> dict[str, NDArray[np.float32]]:
    """The same adapter as peft saved it before it knew which dimension of a parameter has the outputs."""
    found = dict(content)
    for key in [key for key in content if "experts" in key and key.endswith("lora_A.weight")]:
        a, b = content[key], content["B".join(key.rsplit("A", 1))]
        of_a, of_b = a.reshape(experts, -1, a.shape[1]), b.reshape(len(b), -1, experts)
        found[key] = of_b.transpose(2, 1, 0).reshape(-1, len(b)).copy()
        found["B".join(key.rsplit("A", 1))] = of_a.transpose(2, 1, 0).reshape(a.shape[1], -1).copy()
    return found


def test_earlier_peft_had_inputs_and_outputs_the_other_way_round(tmp_path: Path) -> None:
    folder = lora_zoo.folder("qwen3-moe", 1, target_parameters=PARAMETERS, target_modules=("q_proj",))
    config = json.loads((folder / "adapter_config.json").read_text())
    earlier = swapped(load_file(folder / "adapter_model.safetensors"), EXPERTS)
    lora_files.write(tmp_path, earlier, **{**config, "peft_version": "0.18.0"})
    description = describe(read_config(models_zoo.folder("qwen3-moe")), None)
    assert same(read_peft_folder(tmp_path, description, 16), read_peft_folder(folder, description, 16))


def test_where_shapes_do_not_tell_inputs_from_outputs_the_version_does(tmp_path: Path) -> None:
    description, random = describe(OLMOE, None), np.random.default_rng(0)
    container = "base_model.model.model.layers.0.mlp.experts"
    gate_up = {
        f"{container}.lora_A.weight": random.standard_normal((8, 64)).astype(np.float32),
        f"{container}.lora_B.weight": random.standard_normal((64, 8)).astype(np.float32),
    }
    config: dict[str, Any] = {"target_parameters": ["experts.gate_up_proj"]}

    def read(content: dict[str, Any], version: str | None) -> LoraAdapter:
        return read_peft_folder(lora_files.write(tmp_path, content, **config, peft_version=version), description, 16)

    now = read(gate_up, "0.21.2")
    assert same(now, read(swapped(gate_up, 4), "0.19.0"))
    assert not same(now, read(gate_up, "0.19.0"))
    with pytest.raises(ModelError, match=r"experts.*as many inputs as outputs.*peft 0\.19\.1 or later"):
        read(gate_up, None)
    # Another parameter tells it for all.
    config["target_parameters"].append("experts.down_proj")
    both = {key.replace("lora_", "base_layer.lora_"): value for key, value in gate_up.items()} | {
        f"{container}.lora_A.weight": random.standard_normal((8, 32)).astype(np.float32),
        f"{container}.lora_B.weight": random.standard_normal((64, 8)).astype(np.float32),
    }
    found = read(both, None)
    assert same(found, read(swapped(both, 4), None))
    names = {update.name: update for update in found.updates}
    assert all(np.array_equal(update.a, names[update.name].a) for update in now.updates)


@pytest.mark.parametrize(
    ("changes", "fields", "words"),
    [
        ({}, {"target_parameters": None}, ["target_parameters", "does not say which", "gate_up_proj, down_proj"]),
        ({}, {"target_parameters": ["experts.down_proj"]}, ["base_layer", "does not say which"]),
        ({"lora_A.weight": (9, 48)}, {}, ["do not fit", "(4 x rank, 48)", "(64, rank x 4)"]),
        ({"lora_A.weight": (8, 47)}, {}, ["do not fit"]),
        ({"lora_B.weight": (63, 8)}, {}, ["do not fit"]),
        ({"lora_B.weight": (64, 4)}, {}, ["do not fit"]),
        ({"lora_A.weight": (4, 2, 48)}, {}, ["do not fit"]),
        ({"lora_A.weight": (68, 48), "lora_B.weight": (64, 68)}, {}, ["rank 17", "--max-lora-rank 16"]),
        ({"lora_B.bias": (64,)}, {}, ["lora_B.bias", "is not an A or B"]),
        ({"base_layer.base_layer.lora_A.weight": (8, 48)}, {}, ["does not say which"]),
        ({"9.up_proj.lora_A.weight": (8, 64)}, {}, ["experts.9.up_proj", "cannot be changed", "Merge"]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, tuple[int, ...]], fields: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    shapes = {
        "base_layer.lora_A.weight": (8, 64), "base_layer.lora_B.weight": (96, 8),
        "lora_A.weight": (8, 48), "lora_B.weight": (64, 8), **changes,
    }  # fmt: skip
    content = {f"base_model.model.model.layers.1.mlp.experts.{name}": np.ones(shape, np.float32)
               for name, shape in shapes.items()}  # fmt: skip
    folder = lora_files.write(tmp_path, content, **{"target_parameters": [*PARAMETERS], **fields})
    with pytest.raises(ModelError) as failure:
        read_peft_folder(folder, describe({**OLMOE, "intermediate_size": 48}, None), 16)
    assert all(word in str(failure.value) for word in [str(tmp_path), *words])
    assert "\n" not in str(failure.value)


def test_patterns_are_of_parameters(tmp_path: Path) -> None:
    fields = {
        "target_modules": ("q_proj",),
        "target_parameters": (*PARAMETERS, "gate.weight"),
        "rank_pattern": {"gate_up_proj": 3, r"0\..*\.down_proj": 7},
        "alpha_pattern": {r".*\.gate_up_proj": 5, "gate.weight": 1, "1.mlp.experts.down_proj": 4},
    }
    folder = lora_zoo.folder("qwen3-moe", 2, **fields)
    found = read_peft_folder(folder, describe(read_config(models_zoo.folder("qwen3-moe")), None), 16)
    scales = {update.name: update.scale for update in found.updates}
    assert scales["layers.0.experts.7.up"] == pytest.approx(5 / 3)
    assert scales["layers.0.experts.0.down"] == pytest.approx(2 * lora_zoo.RANK / 7)
    assert scales["layers.1.experts.0.down"] == pytest.approx(4 / lora_zoo.RANK)
    assert scales["layers.1.router"] == pytest.approx(1 / lora_zoo.RANK)
    made = running("qwen3-moe", folder)
    expected = lora_zoo.logits("qwen3-moe", TOKENS, 2, **fields)
    np.testing.assert_allclose(made.logits(TOKENS, adapter=0), expected, rtol=2e-3, atol=2e-3)
