"""What is stored of rounded matrices: its readers find their numbers, and other servers which modules have none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.weights.quantized.checkpoint_formats import words
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_packages import require_packages

from tidewheel.engine.quantizing.gptq import Grid, RoundedMatrix
from tidewheel.engine.quantizing.layouts import FOLDER_METHODS, LAYOUTS, FolderMethod
from tidewheel.engine.quantizing.module_names import fused_names, joined_with, patterns
from tidewheel.engine.quantizing.whole_files import file_tensor, write_safetensors
from tidewheel.engine.weights.checkpoint import open_file
from tidewheel.engine.weights.dtypes import DType
from tidewheel.engine.weights.quantized import LayerTensors, layer_reader
from tidewheel.engine.weights.tensor import to_float32

LAYER = "model.layers.0.mlp.up_proj"


def any_matrix(seed: int, grid: Grid, outputs: int, inputs: int) -> RoundedMatrix:
    random = np.random.default_rng(seed)
    groups = (outputs, inputs // grid.group_size)
    scales = (random.integers(1, 128, groups) / 1024).astype(np.float32)  # exact in each type
    zeros = np.full(groups, grid.middle, np.uint8)
    if not grid.symmetric:
        zeros = random.integers(0, grid.largest + 1, groups, np.uint8)
    return RoundedMatrix(random.integers(0, grid.largest + 1, (outputs, inputs), np.uint8), scales, zeros, 0.0)


@pytest.mark.parametrize("method", FOLDER_METHODS)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    outputs=st.integers(1, 4),
    inputs=st.integers(1, 6),
    group=st.sampled_from([32, 64]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_readers_find_the_same_numbers(
    tmp_path_factory: pytest.TempPathFactory,
    method: FolderMethod,
    seed: int,
    outputs: int,
    inputs: int,
    group: int,
    dtype: DType,
) -> None:
    layout = LAYOUTS[method]
    shape = (outputs * layout.outputs, inputs * 64)
    grid = layout.grid(group if layout.groups else shape[1], dtype)
    matrix = any_matrix(seed, grid, *shape)
    path = tmp_path_factory.getbasetemp() / "model.safetensors"
    tensors = layout.tensors(matrix, grid)
    write_safetensors(path, {f"{LAYER}.{part}": file_tensor(array) for part, array in tensors.items()})
    reader = layer_reader({"quantization_config": layout.config(group if layout.groups else None, [], [LAYER])})
    assert reader is not None
    stored = reader.matrix(LayerTensors(LAYER, open_file(path).get))
    assert stored is not None
    scales, zeros = (np.repeat(part, grid.group_size, axis=1) for part in (matrix.scales, matrix.zeros))
    np.testing.assert_array_equal(to_float32(stored.read()), scales * (matrix.codes.astype(np.float32) - zeros))


def test_gptq_packs_inputs_and_stores_zeros_less_one() -> None:
    layout, grid = LAYOUTS["gptq"], Grid(4, 32, symmetric=True)
    matrix = any_matrix(0, grid, 64, 96)
    tensors = layout.tensors(matrix, grid)
    np.testing.assert_array_equal(tensors["qweight"], words(matrix.codes, 4).T)
    np.testing.assert_array_equal(tensors["qzeros"], words(np.full((3, 64), 7), 4))
    np.testing.assert_array_equal(tensors["g_idx"], np.repeat([0, 1, 2], 32))
    assert [(tensors[name].dtype, tensors[name].shape) for name in ("scales", "g_idx")] == [
        (np.float16, (3, 64)), (np.int32, (96,)),
    ]  # fmt: skip


def test_awq_packs_outputs_in_its_order() -> None:
    layout, grid = LAYOUTS["awq"], Grid(4, 32, symmetric=False)
    matrix = any_matrix(0, grid, 64, 96)
    order = [8 * word + nibble for word in range(8) for nibble in (0, 2, 4, 6, 1, 3, 5, 7)]
    tensors = layout.tensors(matrix, grid)
    np.testing.assert_array_equal(tensors["qweight"], words(matrix.codes.T[:, order], 4))
    np.testing.assert_array_equal(tensors["qzeros"], words(matrix.zeros.T[:, order], 4))


def test_transformers_reads_the_configs() -> None:
    require_packages("transformers")
    from transformers import AwqConfig, GPTQConfig

    gptq = GPTQConfig.from_dict(LAYOUTS["gptq"].config(64, ["lm_head"], [LAYER]))
    assert (gptq.bits, gptq.group_size, gptq.sym, gptq.desc_act, gptq.format) == (4, 64, True, False, "gptq")
    awq = AwqConfig.from_dict(LAYOUTS["awq"].config(64, ["lm_head"], [LAYER]))
    assert (awq.bits, awq.group_size, awq.zero_point, awq.format) == (4, 64, True, "gemm")
    assert awq.modules_to_not_convert == ["lm_head"]


KEPT = {
    "lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.layers.3.self_attn.q_proj",
    "model.layers.3.self_attn.k_proj", "model.layers.3.self_attn.v_proj", "model.layers.2.mlp.experts",
}  # fmt: skip
QUANTIZED = {
    "model.layers.0.mlp.gate_proj", "model.layers.13.self_attn.q_proj", "model.layers.2.self_attn.q_proj",
    "model.layers.2.mlp.shared_expert.gate_proj",
}  # fmt: skip


def test_patterns_match_what_is_kept_and_nothing_else() -> None:
    found = [re.compile(pattern) for pattern in patterns(KEPT, QUANTIZED)]

    def kept(module: str) -> bool:
        return any(pattern.match(module) for pattern in found)

    assert all(kept(module) for module in KEPT)
    assert kept("model.layers.2.mlp.experts.0.gate_proj")
    assert not any(kept(module) for module in QUANTIZED)


def test_one_pattern_is_for_the_modules_of_all_layers() -> None:
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(60)]
    assert patterns(gates, QUANTIZED) == [r"model\.layers\.\d+\.mlp\.gate(\.|$)"]


def test_one_pattern_is_for_all_experts_of_a_layer() -> None:
    experts = {layer: [f"model.layers.{layer}.mlp.experts.{i}.up_proj" for i in range(9)] for layer in (60, 61)}
    assert patterns(experts[61], experts[60]) == [r"model\.layers\.61\.mlp\.experts\.\d+\.up_proj(\.|$)"]
    assert patterns(experts[61][:1], experts[61][1:]) == [r"model\.layers\.61\.mlp\.experts\.0\.up_proj(\.|$)"]


MODULES = st.from_regex(r"(a|b)\.[0-2]\.(c|d)\.[0-2]\.(e|f)", fullmatch=True)


@settings(deadline=None)
@given(kept=st.sets(MODULES, max_size=20), quantized=st.sets(MODULES, max_size=20))
def test_patterns_tell_kept_modules_from_quantized_ones(kept: set[str], quantized: set[str]) -> None:
    found = [re.compile(pattern) for pattern in patterns(kept - quantized, quantized)]
    for module in kept | quantized:
        assert any(pattern.match(module) for pattern in found) == (module not in quantized)


@pytest.mark.parametrize("method", ["gptq", "int8"])
def test_the_readers_take_the_patterns(method: FolderMethod) -> None:
    config = LAYOUTS[method].config(64, KEPT, QUANTIZED)
    assert layer_reader({"quantization_config": config}) is not None


def test_matrices_that_other_servers_join_have_each_others_names() -> None:
    assert joined_with("model.layers.0.mlp.up_proj") == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    assert joined_with("model.layers.0.mlp.down_proj") == ["model.layers.0.mlp.down_proj"]
    modules = {f"a.{name}_proj" for name in "qkvo"}
    assert fused_names(modules) == {*modules, "a.qkv_proj"}
    assert fused_names({"a.o_proj"}) == {"a.o_proj"}


def config_of(method: FolderMethod) -> dict[str, Any]:
    layout = LAYOUTS[method]
    return layout.config(128 if layout.groups else None, ["lm_head"], [LAYER])


def test_int8_says_that_activations_are_rounded_for_each_token() -> None:
    group = config_of("int8")["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"]
    assert group["weights"].items() >= {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}.items()
    assert group["input_activations"].items() >= {"num_bits": 8, "strategy": "token", "dynamic": True}.items()


def test_a_file_is_what_the_library_reads(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    arrays = {
        "a": np.arange(3, dtype=np.int8), "b": np.arange(6, dtype=np.int32).reshape(2, 3),
        "c": np.zeros((0, 4), np.float16), "d": np.arange(5, dtype=np.float16), "e": np.float32([7]),
    }  # fmt: skip
    write_safetensors(tmp_path / "a.safetensors", {name: file_tensor(array) for name, array in arrays.items()})
    for name, stored in open_file(tmp_path / "a.safetensors").items():
        assert not stored.data.size or stored.start % arrays[name].itemsize == 0
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
