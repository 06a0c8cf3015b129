"""Quantizing tools store Llama 4's experts as separate modules: they equal those of the released form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine.weights.quantized.checkpoint_formats import FORMATS, Array, save
from model_configs import LLAMA4

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.tensor import DenseTensor, WeightSource, to_float32

CONFIG = {**LLAMA4, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
MATRICES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
EXPERTS = "model.layers.{}.feed_forward.experts"


def opened(folder: Path) -> WeightSource:
    source = open_source(str(folder))
    return source.weights(describe(source.config))


def checkpoints(kind: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """A checkpoint of quantized experts, each matrix in a module of its own, and the same in the released form."""
    random = np.random.default_rng(0)
    description = describe(CONFIG)
    single: dict[str, Array] = {}
    released: dict[str, Array] = {}
    experts: dict[str, Array] = {}
    for name, shape in tensor_shapes(description.spec).items():
        if ".experts." not in name:
            array = random.standard_normal(shape, np.float32)
            single[description.tensors[name].name] = released[description.tensors[name].name] = array
            continue
        _, layer, _, expert, matrix, _ = name.split(".")
        parts, experts[name] = FORMATS[kind].make(random, *shape)
        module = f"{EXPERTS.format(layer)}.{expert}.{MATRICES[matrix]}"
        single |= {f"{module}.{part}": array for part, array in parts.items()}
    for layer in range(CONFIG["num_hidden_layers"]):
        ours = [f"layers.{layer}.experts.{i}" for i in range(CONFIG["num_local_experts"])]
        both = [np.concatenate([experts[f"{one}.gate.weight"], experts[f"{one}.up.weight"]]) for one in ours]
        down = [experts[f"{one}.down.weight"] for one in ours]
        released[f"{EXPERTS.format(layer)}.gate_up_proj"] = np.ascontiguousarray(np.stack(both).swapaxes(1, 2))
        released[f"{EXPERTS.format(layer)}.down_proj"] = np.ascontiguousarray(np.stack(down).swapaxes(1, 2))
    return single, released


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("kind", ["packed-4", "packed-8-channels", "int8", "e4m3-channel", "nvfp4", "gptq-4", "awq"])
def test_quantized_experts_are_those_of_the_released_form(tmp_path: Path, kind: str, prefix: str) -> None:
    single, released = checkpoints(kind)
    config = CONFIG
    if prefix:
        text = {**CONFIG, "model_type": "llama4_text"}
        config = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
        single = {prefix + name: array for name, array in single.items()}
    save(tmp_path / "single", {**config, "quantization_config": FORMATS[kind].config}, single)
    save(tmp_path / "released", CONFIG, released)
    quantized, expected = opened(tmp_path / "single"), opened(tmp_path / "released")
    for name in expected:
        np.testing.assert_array_equal(to_float32(quantized[name]), to_float32(expected[name]), err_msg=name)
        assert isinstance(quantized[name], DenseTensor) == (".experts." not in name)


def test_experts_in_floats_may_be_modules_of_their_own(tmp_path: Path) -> None:
    _, released = checkpoints("int8")
    save(tmp_path / "released", CONFIG, released)
    expected = opened(tmp_path / "released")
    single = {name: array for name, array in released.items() if ".experts." not in name}
    for name in expected:
        if ".experts." in name:
            _, layer, _, expert, matrix, _ = name.split(".")
            module = f"{EXPERTS.format(layer)}.{expert}.{MATRICES[matrix]}"
            single[f"{module}.weight"] = np.ascontiguousarray(to_float32(expected[name]))
    save(tmp_path / "single", CONFIG, single)
    weights = opened(tmp_path / "single")
    for name in expected:
        np.testing.assert_array_equal(to_float32(weights[name]), to_float32(expected[name]), err_msg=name)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            "weight_packed",
            r"tensor model\.layers\.1\.feed_forward\.experts\.gate_up_proj is missing from .*, and so is "
            r"model\.layers\.1\.feed_forward\.experts\.2\.up_proj\.weight, which could be in its place",
        ),
        ("weight_scale", r"tensor model\.layers\.1\.feed_forward\.experts\.2\.up_proj\.weight_scale is missing"),
    ],
)
def test_what_an_expert_lacks_is_named(tmp_path: Path, part: str, words: str) -> None:
    single, _ = checkpoints("packed-4")
    del single[f"{EXPERTS.format(1)}.2.up_proj.{part}"]
    save(tmp_path, {**CONFIG, "quantization_config": FORMATS["packed-4"].config}, single)
    with pytest.raises(ModelError, match=words):
        opened(tmp_path)
