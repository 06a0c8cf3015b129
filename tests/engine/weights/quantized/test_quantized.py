"""Quantized checkpoints: every method's weights follow its description, and bad files are refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.weights.quantized.checkpoint_formats import (
    FORMATS,
    MXFP4,
    Array,
    Format,
    bitsandbytes,
    gptq,
    mxfp4_experts,
    packed,
    save,
)
from harness import load, make_device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import sample

from tidewheel.engine.errors import ModelError
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.models.tensor_ref import TensorRef
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.finite import require_finite
from tidewheel.engine.weights.small_floats import SmallFloatTensor
from tidewheel.engine.weights.tensor import DenseTensor, QuantizedTensor, WeightSource, to_float32

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
NAMES = {name: ref.name for name, ref in describe(CONFIG).tensors.items()}
UP = "model.layers.0.mlp.up_proj"
NF4_STATE = "weight.quant_state.bitsandbytes__nf4"


def state(**fields: Any) -> Callable[[Array], Array]:
    """A change of what the JSON of a bitsandbytes layer says."""
    return lambda array: np.frombuffer(json.dumps({**json.loads(array.tobytes()), **fields}).encode(), np.uint8)


def not_a_number(array: Array) -> Array:
    """With such a float of 8 bits."""
    changed = array.copy()
    changed.view(np.uint8)[3, 1] = 255
    return changed


def targets(*names: str) -> dict[str, Any]:
    """A field of a config with these layers."""
    return {"config_groups": {"a": {"targets": names, "weights": {}}}}


def model(
    format: Format, seed: int = 0, config: Mapping[str, Any] = CONFIG
) -> tuple[dict[str, Array], dict[str, Array]]:
    """A checkpoint whose layers' matrices are quantized, and the weights it stands for, by Tidewheel's names."""
    random = np.random.default_rng(seed)
    tensors, weights = {}, {}
    for name, shape in tensor_shapes(describe(config).spec).items():
        is_dense = any(part in NAMES[name] for part in format.dense)
        if len(shape) == 2 and name.startswith("layers.") and not is_dense:
            parts, weights[name] = format.make(random, *shape)
            tensors |= {NAMES[name].removesuffix("weight") + part: array for part, array in parts.items()}
        else:
            weights[name] = tensors[NAMES[name]] = random.standard_normal(shape, np.float32).astype(np.float16)
    return tensors, weights


@functools.cache
def tensors_of(kind: str) -> dict[str, Array]:
    """The tensors of a checkpoint in one of FORMATS."""
    return model(FORMATS[kind])[0]


def opened(
    folder: Path, format: Format, tensors: Mapping[str, Array], /, config: Mapping[str, Any] = CONFIG, **fields: Any
) -> WeightSource:
    save(folder, {**config, "quantization_config": {**format.config, **fields}}, tensors)
    source = open_source(str(folder))
    return source.weights(describe(source.config))


@pytest.mark.parametrize("kind", FORMATS)
def test_the_weights_are_the_formats(tmp_path: Path, kind: str) -> None:
    tensors, expected = model(FORMATS[kind])
    weights = opened(tmp_path, FORMATS[kind], tensors)
    assert weights.dtype == "float16"
    for name in weights:
        require_finite([weights[name]])
        np.testing.assert_array_equal(to_float32(weights[name]), expected[name], err_msg=name)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not say what a process has mapped")
@pytest.mark.parametrize("kind", sample(FORMATS, lambda kind: [*FORMATS].index(kind) % 3 == 0))
def test_files_are_unmapped_with_the_weights(tmp_path: Path, kind: str) -> None:
    tensors, _ = model(FORMATS[kind])
    gc.disable()  # a server that starts collects no cycles
    try:
        weights = opened(tmp_path, FORMATS[kind], tensors)
        assert str(tmp_path) in Path("/proc/self/maps").read_text()
        del weights
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("gptq-3-order", 3), ("packed-3", 3), ("gptq-2", 2), ("awq", 4), ("packed-8-zeros-order", 8), ("int8", 8)],
)
def test_integers_keep_the_bits_of_the_file(tmp_path: Path, kind: str, bits: int) -> None:
    tensor = opened(tmp_path, FORMATS[kind], model(FORMATS[kind])[0])["layers.0.up.weight"]
    assert isinstance(tensor, QuantizedTensor)
    assert tensor.bits == bits
    assert tensor.codes.nbytes == 160 * 64 * bits // 8


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [
        ("fp8", 160 * (64 + 4)),  # a scale for each row of a block
        ("e4m3-channel", 160 * (64 + 4)),
        ("e4m3-tensor", 160 * (64 + 4)),
        ("nvfp4", 160 * (32 + 4)),
        ("nf4", 160 * (32 + 4)),
        ("fp4-rest", 160 * (32 + 4)),
    ],
)
def test_small_floats_keep_the_bits_of_the_file(tmp_path: Path, kind: str, num_bytes: int) -> None:
    weights = opened(tmp_path, FORMATS[kind], model(FORMATS[kind])[0])
    tensor, format = weights["layers.0.up.weight"], weights.stored_format("layers.0.up.weight")
    assert isinstance(tensor, SmallFloatTensor)
    assert tensor.stored_format == format
    assert tensor.codes.nbytes + tensor.scales.nbytes == num_bytes == format.num_bytes((160, 64))


def test_double_quantization_is_kept_where_it_takes_less(tmp_path: Path) -> None:
    format, config = bitsandbytes(double=True, block=32), {**CONFIG, "intermediate_size": 1536}
    tensors, expected = model(format, config=config)
    weights = opened(tmp_path, format, tensors, config=config)
    name, rows, groups = "layers.0.down.weight", 64, 48
    tensor, stored = weights[name], weights.stored_format(name)
    assert isinstance(tensor, SmallFloatTensor)
    assert tensor.scale_codes is not None
    assert tensor.stored_format == stored
    num_bytes = tensor.codes.nbytes + tensor.scales.nbytes + tensor.scale_codes.largest.nbytes
    assert num_bytes + tensor.scale_codes.offsets.nbytes == stored.num_bytes(tensor.shape)
    assert num_bytes == rows * groups * (16 + 1) + rows * 3 * 4  # 16 groups of a row have a number in common
    np.testing.assert_array_equal(to_float32(tensor), expected[name])
    up = weights["layers.0.up.weight"]
    assert isinstance(up, SmallFloatTensor)
    assert up.scale_codes is None  # rows of two groups
    np.testing.assert_array_equal(to_float32(up), expected["layers.0.up.weight"])


def test_blocks_across_rows_become_floats_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    weights = opened(tmp_path, FORMATS["nf4"], model(FORMATS["nf4"])[0])
    assert isinstance(weights["layers.0.down.weight"], DenseTensor)  # 160 inputs, and blocks of 64
    assert weights.stored_format("layers.0.down.weight") is None
    assert [record.message for record in caplog.records if "dequantized" in record.message] == [
        f"{tmp_path}/model.safetensors: tensor model.layers.0.mlp.down_proj.weight and others like it are "
        "dequantized as they are read, because their blocks continue in the next row"
    ]


def read(folder: Path, format: Format, tensors: Mapping[str, Array], /, **fields: Any) -> None:
    """Open such a folder, and read all of it."""
    weights = opened(folder, format, tensors, **fields)
    for name in weights:
        require_finite([weights[name]])
        to_float32(weights[name])


def refused(folder: Path, format: Format, tensors: Mapping[str, Array], /, **fields: Any) -> str:
    """What reading such a folder says."""
    with pytest.raises(ModelError) as caught:
        read(folder, format, tensors, **fields)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("awq", {"quant_method": "aqlm"}, "'aqlm' are not supported; supported are gptq, awq"),
        ("awq", {"quant_method": None}, "does not name its quant_method"),
        ("awq", {"version": "gemv"}, "AWQ's version 'gemv'"),
        ("awq", {"bits": 8}, "AWQ of 8 bits"),
        ("awq", {"zero_point": False}, "without zero points"),
        ("awq", {"group_size": 0}, "group_size must be a positive integer"),
        ("gptq-4", {"bits": 5}, "bits must be 2, 3, 4 or 8"),
        ("gptq-4", {"bits": None}, "bits is missing"),
        ("gptq-4", {"checkpoint_format": "marlin"}, "GPTQ's format 'marlin'"),
        ("gptq-4", {"pack_dtype": "int16"}, "pack_dtype"),
        ("gptq-4", {"dynamic": {"a{9999999999}": {}}}, "not a regular expression"),
        ("gptq-4", {"dynamic": {"-:(a|aa)+$": {}}}, "dynamic: '(a|aa)+$' repeats a group"),
        ("gptq-4", {"dynamic": {"x": {"bits": 7}}}, "dynamic 'x': bits must be"),
        ("packed-4", {"format": "marlin-24"}, "format 'marlin-24'"),
        ("packed-4", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config"),
        ("packed-4", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ("packed-4", {"config_groups": None}, "config_groups is missing"),
        (
            "packed-4",
            {"config_groups": {"a": {"targets": ["Linear"]}}},
            "config_groups.a has no quantization of weights",
        ),
        ("packed-4", {"config_groups": {"a": {"targets": ["other"], "weights": {}}}}, "no target of config_groups"),
        ("packed-4", {"config_groups": {"a": {"targets": ["re:("], "weights": {}}}}, "not a regular expression"),
        ("packed-4", targets("re:(?:[a-z]*)*x"), "'(?:[a-z]*)*x' repeats a group, which can take forever"),
        ("packed-4", targets("re:(a+)(?#hidden)+$"), "has a group that is not (...)"),
        ("packed-4", targets("re:(?x)(a+) +$"), "has a group that is not (...)"),
        ("packed-4", targets("re:" + ".*" * 7 + "x"), "can match in too many ways (2^35)"),
        ("packed-4", targets("re:" + "(a|a|a|a|a|a|a|a)" * 11), "can match in too many ways (2^33)"),
        ("packed-4", targets("re:" + "a?" * 31), "can match in too many ways (2^31)"),
        ("packed-4", targets("re:" + "x" * 513), "has 513 characters, more than the 512 there may be"),
        ("packed-4", {"config_groups": {"a": {"targets": [], "weights": {"strategy": "row"}}}}, "strategy must be"),
        ("fp8", {"weight_block_size": [128]}, "weight_block_size must be two positive integers"),
        ("fp8", {"fmt": "e5m2"}, "fmt = 'e5m2'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, kind: str, fields: dict[str, Any], words: str
) -> None:
    assert words in refused(tmp_path, FORMATS[kind], model(FORMATS[kind])[0], **fields)


@pytest.mark.parametrize(
    ("kind", "part", "change", "words"),
    [
        ("gptq-4", "qweight", None, f"{UP}.weight is missing"),
        ("gptq-4", "scales", None, f"{UP}.scales is missing"),
        ("gptq-4", "qzeros", lambda a: a[:, 1:], f"tensor {UP}.qzeros has shape (2, 19), but must have (2, 20)"),
        ("gptq-4", "qweight", lambda a: a.astype(np.int64), f"{UP}.qweight is stored as I64"),
        ("gptq-4", "qweight", lambda a: a[0], f"{UP}.qweight has shape (160,), but must be a matrix"),
        ("gptq-3", "qweight", lambda a: a[:5], f"{UP}.qweight has 5 rows, which 3 bits an input cannot fill"),
        ("gptq-3", "g_idx", lambda a: a + 1, f"{UP}.g_idx must give each of 2 groups 32 of 64 inputs"),
        ("gptq-4", "g_idx", lambda a: np.zeros_like(a), f"{UP}.g_idx must give each"),
        ("gptq-4", "g_idx", lambda a: a - 2**30, f"{UP}.g_idx must give each"),
        ("awq", "scales", lambda a: a * np.float16(np.nan), f"{UP}.scales has 320 values that are not finite"),
        ("packed-4", "weight_shape", lambda a: a * 2**40, f"{UP}.weight_shape says"),
        ("packed-4", "weight_shape", lambda a: a * -1, f"{UP}.weight_shape says"),
        ("packed-4", "weight_scale", lambda a: a[:-1], f"{UP}.weight_scale has shape (159, 2), but must have (160, 2)"),
        ("packed-8-channels", "weight_packed", lambda a: a[:, 1:], f"{UP}.weight_shape says"),
        ("packed-3", "weight_packed", lambda a: a[:, 1:], f"{UP}.weight_shape says (160, 64), but 3 bits in 160 x 5"),
        ("gptq-4", "scales", lambda a: a * 0, f"{UP}.scales has only zeros"),
        ("awq", "scales", lambda a: a * -0, f"{UP}.scales has only zeros"),
        ("int8", "weight_scale", lambda a: a * 0, f"{UP}.weight_scale has only zeros"),
        ("fp8", "weight_scale_inv", lambda a: a * 0, f"{UP}.weight_scale_inv has only zeros"),
        ("nvfp4", "weight_scale", lambda a: a * 0, f"{UP}.weight_scale has only zeros"),
        ("nf4", "weight.absmax", lambda a: a * 0, f"{UP}.weight.absmax has only zeros"),
        ("llm-int8", "SCB", lambda a: a * 0, f"{UP}.SCB has only zeros"),
        ("int8", "weight", lambda a: a.astype(np.float32), f"{UP}.weight is stored as F32; supported are I8"),
        ("int8-zeros", "weight_zero_point", None, f"{UP}.weight_zero_point is missing"),
        ("e4m3-channel", "weight_scale", lambda a: a[:, 0][1:], f"{UP}.weight_scale has shape (159,), but must have"),
        ("e4m3-channel", "weight_scale", lambda a: a * np.float16(np.inf), f"{UP}.weight_scale has"),
        ("fp8", "weight", not_a_number, f"{UP}.weight has 1 value that is not finite"),
        ("nvfp4", "weight_scale", not_a_number, f"{UP}.weight_scale has 1 value that is not finite"),
        ("fp8", "weight_scale_inv", lambda a: a[:1], f"{UP}.weight_scale_inv has shape (1, 1), but must have (2, 1)"),
        ("mxfp4", "weight_scale", lambda a: a | np.uint8(255), f"{UP}.weight_packed has"),
        ("nvfp4", "weight_global_scale", lambda a: a * 0, f"{UP}.weight_global_scale is 0"),
        ("nf4", NF4_STATE, None, f"{UP}.weight is quantized, but has neither SCB nor quant_state"),
        ("nf4", NF4_STATE, lambda a: a[:-1], f"{UP}.{NF4_STATE} is not JSON"),
        ("nf4", NF4_STATE, lambda a: np.tile(a, 99), f"{UP}.{NF4_STATE} has 7722 bytes, more than the 4096"),
        ("nf4", NF4_STATE, state(shape=[2**60, 64]), f"{UP}.{NF4_STATE} must have a shape of two"),
        ("nf4", NF4_STATE, state(shape=[64, 64]), f"{UP}.{NF4_STATE} says (64, 64), but tensor {UP}.weight has 5120"),
        ("nf4", NF4_STATE, state(blocksize=0), f"{UP}.{NF4_STATE} must have a blocksize of 32, 64"),
        ("nf4", NF4_STATE, state(quant_type="fp4"), f"{UP}.{NF4_STATE} says quant_type 'fp4'"),
        ("nf4", "weight.absmax", lambda a: a * np.float32(np.nan), f"{UP}.weight.absmax has values that are not"),
        ("nf4", "weight.absmax", lambda a: a[1:], f"{UP}.weight.absmax has shape (159,), but must have (160,)"),
        ("nf4-double", NF4_STATE, state(nested_offset=None), f"{UP}.{NF4_STATE} must have a nested_offset"),
        ("nf4-double", "weight.nested_quant_map", None, f"{UP}.weight.nested_quant_map is missing"),
        ("llm-int8", "SCB", lambda a: a * np.float32(np.inf), f"{UP}.SCB has 160 values that are not finite"),
        ("llm-int8", "weight_format", lambda a: a + np.uint8(2), f"{UP}.weight_format says that the weight is"),
    ],
)
def test_bad_tensors_are_named(
    tmp_path: Path, kind: str, part: str, change: Callable[[Array], Array] | None, words: str
) -> None:
    tensors, _ = model(FORMATS[kind])
    array = tensors.pop(f"{UP}.{part}")
    if change is not None:
        tensors[f"{UP}.{part}"] = np.array(change(array), order="C")
    assert words in refused(tmp_path, FORMATS[kind], tensors)


def test_scales_that_are_all_zero_are_found_behind_their_codes(tmp_path: Path) -> None:
    tensors, _ = model(FORMATS["nf4-double"])
    tensors[f"{UP}.{NF4_STATE}"] = state(nested_offset=0.0)(tensors[f"{UP}.{NF4_STATE}"])
    tensors[f"{UP}.weight.nested_absmax"] *= 0
    assert f"{UP}.weight.nested_absmax has only zeros" in refused(tmp_path, FORMATS["nf4-double"], tensors)


@pytest.mark.parametrize(("kind", "part"), [("awq", "scales"), ("packed-4", "weight_scale"), ("nf4", "weight.absmax")])
def test_a_scale_of_zero_makes_its_group_zero(tmp_path: Path, kind: str, part: str) -> None:
    tensors, _ = model(FORMATS[kind])
    scales = tensors[f"{UP}.{part}"]
    scales.reshape(-1)[:1] = 0
    weights = to_float32(opened(tmp_path, FORMATS[kind], tensors)["layers.0.up.weight"])
    assert np.count_nonzero(weights[0, :32]) == 0
    assert np.count_nonzero(weights) > 0


def test_layers_of_one_checkpoint_may_be_quantized_in_other_ways(tmp_path: Path) -> None:
    other, dense = gptq(8, group=16), r"-:.*\.down_proj"
    format = dataclasses.replace(
        gptq(), config={**gptq().config, "dynamic": {dense: {}, r"+:.*\.up_proj$": {"bits": 8, "group_size": 16}}}
    )
    tensors, expected = model(format)
    random = np.random.default_rng(1)
    parts, expected["layers.0.up.weight"] = other.make(random, 160, 64)
    tensors |= {f"{UP}.{part}": array for part, array in parts.items()}
    down = "model.layers.0.mlp.down_proj"
    tensors = {name: array for name, array in tensors.items() if not name.startswith(down)}
    tensors[f"{down}.weight"] = expected["layers.0.down.weight"] = random.standard_normal((64, 160), np.float32)
    weights = opened(tmp_path, format, tensors)
    for name in weights:
        np.testing.assert_array_equal(to_float32(weights[name]), expected[name], err_msg=name)


@pytest.mark.parametrize(
    "target",
    [
        r"re:.*mlp\.(gate|up|down)_proj$",
        r"re:model\.layers\.\d+\.mlp\..*",
        r"re:^(?!.*(?:lm_head|self_attn)).*",
        r"re:.*[.](mlp[*+(]?)[.]\w+_proj",
        r"re:.*?layers\.(?:[0-9]|[1-9][0-9]{1,2})\.mlp\.(?:experts\.\d+\.)?[a-z]+_proj",
    ],
)
def test_patterns_name_layers(tmp_path: Path, target: str) -> None:
    group = {"targets": ["Linear"], "weights": packed().config["config_groups"]["group_0"]["weights"]}
    other = {**FORMATS["int8"].config["config_groups"]["group_0"], "targets": [target]}
    tensors, expected = model(packed())
    layers = ("gate_proj", "up_proj", "down_proj")
    tensors = {name: array for name, array in tensors.items() if name.split(".")[-2] not in layers}
    random = np.random.default_rng(1)
    for name in layers:
        shape = (64, 160) if name == "down_proj" else (160, 64)
        parts, expected[f"layers.0.{name.removesuffix('_proj')}.weight"] = FORMATS["int8"].make(random, *shape)
        tensors |= {f"model.layers.0.mlp.{name}.{part}": array for part, array in parts.items()}
    weights = opened(tmp_path, packed(), tensors, config_groups={"a": group, "b": other}, format="mixed-precision")
    for name in weights:
        np.testing.assert_array_equal(to_float32(weights[name]), expected[name], err_msg=name)


def test_groups_of_layers_have_schemes_of_their_own(tmp_path: Path) -> None:
    tensors, expected = model(packed())
    parts, expected["layers.0.up.weight"] = FORMATS["int8"].make(np.random.default_rng(1), 160, 64)
    tensors = {name: array for name, array in tensors.items() if not name.startswith(UP)}
    tensors |= {f"{UP}.{part}": array for part, array in parts.items()}
    groups = {
        "a": packed().config["config_groups"]["group_0"],
        "b": {**FORMATS["int8"].config["config_groups"]["group_0"], "targets": [r"re:.*up_proj$"]},
    }
    weights = opened(tmp_path, packed(), tensors, config_groups=groups, format="mixed-precision")
    for name in weights:
        np.testing.assert_array_equal(to_float32(weights[name]), expected[name], err_msg=name)


def test_a_head_that_is_quantized_cannot_be_tied(tmp_path: Path) -> None:
    tensors, _ = model(FORMATS["awq"])
    parts, _ = FORMATS["awq"].make(np.random.default_rng(1), 40, 64)
    del tensors["lm_head.weight"]
    tensors |= {f"lm_head.{part}": array for part, array in parts.items()}
    save(tmp_path, {**CONFIG, "tie_word_embeddings": True, "quantization_config": FORMATS["awq"].config}, tensors)
    source = open_source(str(tmp_path))
    with pytest.raises(ModelError, match=r"lm_head\.weight is quantized by itself"):
        source.weights(describe(source.config))
    weights = opened(tmp_path, FORMATS["awq"], tensors)
    assert isinstance(weights["head.weight"], QuantizedTensor)


def test_groups_and_blocks_may_be_larger_than_the_matrix(tmp_path: Path) -> None:
    # What is made for them must not be as large as the files say.
    read(tmp_path, FORMATS["gptq-channels"], model(FORMATS["gptq-channels"])[0], group_size=2**31 - 1)
    tensors, _ = model(FORMATS["fp8-tensor"])
    scales = {name: array.reshape(1, 1) for name, array in tensors.items() if name.endswith("scale")}
    read(tmp_path, FORMATS["fp8-tensor"], tensors | scales, weight_block_size=[2**31 - 1] * 2)


def test_what_the_config_says_is_part_of_the_identity(tmp_path: Path) -> None:
    tensors, _ = model(FORMATS["gptq-v2-said-v1"])
    identity = opened(tmp_path, FORMATS["gptq-v2-said-v1"], tensors).identity
    assert identity is not None
    assert described(tmp_path).identity == identity
    assert described(tmp_path, sym=False).identity != identity


def described(folder: Path, **fields: Any) -> WeightSource:
    """The weights of a folder, whose quantization is said to be another."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    source = open_source(str(folder))
    return source.weights(describe(source.config))


UP_REFS = st.lists(
    st.builds(
        lambda start, count, seed: TensorRef(
            f"{UP}.weight",
            rows=(start, start + count),
            permute=tuple(np.random.default_rng(seed).permutation(count).tolist()),
        ),
        st.integers(0, 60),
        st.just(80),
        st.integers(0, 99),
    ),
    min_size=2,
    max_size=2,
)


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["gptq-3-order", "awq", "packed-8-zeros-order", "int8", "e4m3-channel", "nvfp4", "nf4"]), UP_REFS
)
def test_rows_are_cut_and_joined_exactly(tmp_path: Path, kind: str, refs: list[TensorRef]) -> None:
    tensors, expected = model(FORMATS[kind])
    opened(tmp_path, FORMATS[kind], tensors)
    source = open_source(str(tmp_path))
    what = describe(source.config)
    up = dataclasses.replace(refs[0], stack=(refs[1],))
    tensor = source.weights(dataclasses.replace(what, tensors={**what.tensors, "layers.0.up.weight": up}))[
        "layers.0.up.weight"
    ]
    assert isinstance(tensor, QuantizedTensor | SmallFloatTensor)
    whole = expected["layers.0.up.weight"]
    wanted = np.concatenate([whole[ref.rows[0] : ref.rows[1]][list(ref.permute)] for ref in refs])
    np.testing.assert_array_equal(to_float32(tensor), wanted)


def test_what_is_quantized_in_two_ways_is_joined_in_floats(tmp_path: Path) -> None:
    tensors, expected = model(gptq())
    gate = TensorRef("model.layers.0.mlp.gate_proj.weight", rows=(0, 80))
    parts, other = gptq(group=16).make(np.random.default_rng(1), 160, 64)
    tensors |= {f"{UP}.{part}": array for part, array in parts.items()}
    fields = {"dynamic": {r".*up_proj": {"group_size": 16}}}
    opened(tmp_path, gptq(), tensors, **fields)
    source = open_source(str(tmp_path))
    what = describe(source.config)
    both = dataclasses.replace(gate, stack=(TensorRef(f"{UP}.weight", rows=(0, 80)),))
    weights = source.weights(dataclasses.replace(what, tensors={**what.tensors, "layers.0.up.weight": both}))
    wanted = np.concatenate([expected["layers.0.gate.weight"][:80], other[:80]])
    np.testing.assert_array_equal(to_float32(weights["layers.0.up.weight"]), wanted)


@pytest.mark.parametrize("group", [96, 64])
def test_the_memory_that_is_planned_is_what_the_weights_take(tmp_path: Path, group: int) -> None:
    """The kernels have no groups of 96 inputs: such matrices are dequantized as they are read, and counted so."""
    config = {**CONFIG, "hidden_size": 192, "intermediate_size": 192}
    tensors, _ = model(gptq(group=group), config=config)
    save(tmp_path, {**config, "quantization_config": gptq(group=group).config}, tensors)
    planned = open_model(EngineOptions(str(tmp_path), device="cpu", skip_tokenizer_init=True))
    assert planned.keeps_bits == (group == 64)
    executor = load(make_device("cpu"), tmp_path, "float16")
    taken = executor.native.weight_bytes  # type: ignore[attr-defined]
    executor.close()
    assert planned.weight_bytes <= taken <= 1.2 * planned.weight_bytes  # with padding


def test_an_override_says_how_weights_are_read(tmp_path: Path) -> None:
    tensors, _ = model(gptq())
    save(tmp_path, CONFIG, tensors)
    options = EngineOptions(str(tmp_path), device="cpu", skip_tokenizer_init=True)
    with pytest.raises(ModelError, match=r"_proj\.weight"):
        open_model(options)
    said = {"quantization_config": gptq().config}
    assert open_model(dataclasses.replace(options, hf_overrides=said, quantization="gptq")).keeps_bits
    said = {"quantization_config": {"quant_method": "hqq"}}
    with pytest.raises(ModelError, match="checkpoints quantized by 'hqq' are not supported"):
        open_model(dataclasses.replace(options, hf_overrides=said))


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        ("gptq-4", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": True, "sym": False}),
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
    ],
)
def test_early_checkpoints_have_the_settings_in_a_file_of_their_own(
    kind: str, name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    tensors, expected = model(FORMATS[kind])
    save(tmp_path, CONFIG, tensors)
    (tmp_path / name).write_text(json.dumps(settings))
    source = open_source(str(tmp_path))
    weights = source.weights(describe(source.config))
    for weight in weights:
        np.testing.assert_array_equal(to_float32(weights[weight]), expected[weight], err_msg=weight)
    options = EngineOptions(str(tmp_path), device="cpu", skip_tokenizer_init=True, quantization="fp8")
    with pytest.raises(ModelError, match=f"this one's is '{kind[:4].rstrip('-')}'"):
        open_model(options)
    (tmp_path / name).write_text("[]")
    with pytest.raises(ModelError, match=f"{name} must hold a JSON object"):
        open_model(options)


def experts(folder: Path, tensors: Mapping[str, Array]) -> WeightSource:
    """The weights of a model with an expert's up and gate: rows in turn, inputs before outputs."""
    dense = {name: array for name, array in model(packed())[0].items() if "_proj" not in name}
    random = np.random.default_rng(0)
    for name, shape in tensor_shapes(describe(CONFIG).spec).items():
        if len(shape) == 2 and name.startswith("layers."):
            dense[NAMES[name]] = random.standard_normal(shape, np.float32)
    save(folder, {**CONFIG, "quantization_config": MXFP4}, dense | dict(tensors))
    source = open_source(str(folder))
    what, name = describe(source.config), "model.layers.0.mlp.experts.gate_up_proj"
    refs = {
        f"layers.0.{part}.weight": TensorRef(name, index=1, transpose=True, each=(2, i, i + 1))
        for i, part in enumerate(("gate", "up"))
    }
    return source.weights(dataclasses.replace(what, tensors={**what.tensors, **refs}))


def test_experts_in_mxfp4_are_the_formats(tmp_path: Path) -> None:
    tensors, expected = mxfp4_experts(np.random.default_rng(0), "model.layers.0.mlp.experts.gate_up_proj", 2, 320, 64)
    weights = experts(tmp_path, tensors)
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = (torch.from_numpy(array) for array in tensors.values())
    of_transformers = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy()
    np.testing.assert_array_equal(of_transformers.swapaxes(1, 2), expected)
    for i, name in enumerate(("gate", "up")):
        require_finite([weights[f"layers.0.{name}.weight"]])
        np.testing.assert_array_equal(to_float32(weights[f"layers.0.{name}.weight"]), expected[1, i::2])


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("blocks", lambda a: a[:1], "_blocks has shape (1, 320, 2, 16), but the model needs more than 1 experts"),
        ("blocks", lambda a: a[..., :8], "_blocks has shape (2, 320, 2, 8), but must have (experts, outputs"),
        ("blocks", lambda a: a.view(np.int8), "_blocks is stored as I8; supported are U8"),
        ("blocks", lambda a: a[:, 1:], "_scales has shape (2, 320, 2), but must have (2, 319, 2)"),
        ("scales", lambda a: a | np.uint8(255), "_blocks has 320 values that are not finite"),
    ],
)
def test_bad_experts_are_named(tmp_path: Path, part: str, change: Callable[[Array], Array], words: str) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors, _ = mxfp4_experts(np.random.default_rng(0), name, 2, 320, 64)
    tensors[f"{name}_{part}"] = np.ascontiguousarray(change(tensors[f"{name}_{part}"]))
    with pytest.raises(ModelError) as caught:
        require_finite([experts(tmp_path, tensors)["layers.0.up.weight"]])
    assert f"tensor {name}{words}" in str(caught.value)


JSON = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3), st.lists(st.integers()),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=1),
)  # fmt: skip
FIELDS = (
    "bits", "group_size", "sym", "dynamic", "version", "zero_point", "config_groups", "format", "sparsity_config",
    "transform_config", "weight_block_size", "checkpoint_format", "method",
)  # fmt: skip


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_the_files_say_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(FORMATS)))
    tensors = dict(tensors_of(kind))
    fields = data.draw(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2))
    if "config_groups" in FORMATS[kind].config and "config_groups" not in fields:
        weights = {**FORMATS[kind].config["config_groups"]["group_0"]["weights"]}
        name = data.draw(st.sampled_from([*weights]))
        group = {"targets": ["Linear"], "weights": {**weights, name: data.draw(JSON)}}
        fields["config_groups"] = {"group_0": group}
    name = data.draw(st.sampled_from(sorted(tensor for tensor in tensors if tensor.startswith(UP))))
    array = tensors[name]
    shape = data.draw(st.lists(st.integers(0, 200), max_size=3).filter(lambda shape: np.prod(shape) <= 2**16))
    tensors[name] = np.resize(array, shape) if array.size else array
    with contextlib.suppress(ModelError):
        read(tmp_path, FORMATS[kind], tensors, **fields)
