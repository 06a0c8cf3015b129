"""Checkpoints: every layout that is read, and a clear error for every one that is not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import ModelDescription, describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.weights import open_source, open_weights
from tidewheel.engine.weights.checkpoint import open_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 20,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 64,
}
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

Tensors = dict[str, np.ndarray[Any, Any]]


def description(**fields: Any) -> ModelDescription:
    return describe({**CONFIG, **fields})


def random_tensors(what: ModelDescription) -> Tensors:
    random = np.random.default_rng(0)
    shapes = tensor_shapes(what.spec)
    return {what.tensors[n].name: random.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}


def test_biases_that_the_config_says_nothing_of_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unless they are zeros, as some tools write them."""
    what = description()
    tensors = random_tensors(what)
    tensors["model.layers.0.mlp.up_proj.bias"] = np.zeros(12, np.float32)
    save_as(tmp_path, tensors)
    open_weights(tmp_path, what)
    assert not caplog.records
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(8, np.float32)
    save_as(tmp_path, tensors)
    open_weights(tmp_path, what)
    [said] = [record.getMessage() for record in caplog.records]
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert said.startswith(f"{tmp_path / FILE}: these biases are not used, because config.json says")
    assert f": {bias}" in said


def save_as(folder: Path, tensors: Mapping[str, np.ndarray[Any, Any]], name: str = FILE) -> None:
    save_file(dict(tensors), folder / name)


def rewrite_header(path: Path, change: Any) -> None:
    """Put `change(header)` in place of a file's header."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.dumps(change(json.loads(raw[8 : 8 + length]))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def test_a_single_file_is_mapped_not_copied(tmp_path: Path) -> None:
    what, tensors = description(), random_tensors(description())
    save_as(tmp_path, tensors)
    weights = open_weights(tmp_path, what)
    assert weights.dtype == "float32"
    assert list(weights) == list(tensor_shapes(what.spec))
    for name in weights:
        tensor = weights[name]
        np.testing.assert_array_equal(tensor.data, tensors[what.tensors[name].name], strict=True)
        assert not tensor.data.flags.owndata
        assert not tensor.data.flags.writeable


def test_bfloat16_comes_as_bits(tmp_path: Path) -> None:
    what = description()
    bits = {name: (value.view(np.uint32) >> 16).astype(np.uint16) for name, value in random_tensors(what).items()}
    save_as(tmp_path, bits)
    rewrite_header(tmp_path / FILE, lambda h: {n: {**e, "dtype": "BF16"} for n, e in h.items() if n != "__metadata__"})
    weights = open_weights(tmp_path, what)
    assert weights.dtype == "bfloat16"
    np.testing.assert_array_equal(weights["embed.weight"].data, bits["model.embed_tokens.weight"], strict=True)


def test_the_dtype_is_that_of_most_bytes(tmp_path: Path) -> None:
    what = description()
    mixed = {n: v if v.ndim == 1 else v.astype(np.float16) for n, v in random_tensors(what).items()}
    save_as(tmp_path, mixed)
    weights = open_weights(tmp_path, what)
    assert weights.dtype == "float16"
    assert weights["final_norm.weight"].dtype == "float32"


def test_shards_are_joined_by_the_index(tmp_path: Path) -> None:
    what, tensors = description(), random_tensors(description())
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        shard = f"model-0000{i}-of-00003.safetensors"
        save_as(tmp_path, {n: tensors[n] for n in names[i::3]}, shard)
        weight_map |= dict.fromkeys(names[i::3], shard)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    weights = open_weights(tmp_path, what)
    for name in weights:
        np.testing.assert_array_equal(weights[name].data, tensors[what.tensors[name].name])

    lost = weight_map[names[1]]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**weight_map, names[0]: lost}}))
    with pytest.raises(ModelError, match=f"{lost} lacks tensor '{names[0]}'"):
        open_weights(tmp_path, what)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / lost).unlink()
    with pytest.raises(ModelError, match=f"{lost}, a shard that {INDEX} names, does not exist"):
        open_weights(tmp_path, what)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_a_bad_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelError, match=INDEX):
        open_checkpoint(tmp_path)


def test_one_file_of_another_name_will_do_but_not_several(tmp_path: Path) -> None:
    what = description()
    save_as(tmp_path, random_tensors(what), "weights.safetensors")
    save_as(tmp_path, {"a": np.zeros(1)}, "adapter_model.safetensors")
    open_weights(tmp_path, what)
    save_as(tmp_path, {"a": np.zeros(1)}, "more.safetensors")
    with pytest.raises(ModelError, match="several weight files"):
        open_weights(tmp_path, what)


def test_names_may_lack_the_base_prefix(tmp_path: Path) -> None:
    what = describe(GPT2)
    random = np.random.default_rng(0)
    fused = random.standard_normal((8, 24), dtype=np.float32)
    shapes = tensor_shapes(what.spec)
    tensors = {
        ref.name.removeprefix("transformer."): np.zeros(shapes[n][::-1] if ref.transpose else shapes[n], np.float32)
        for n, ref in what.tensors.items()
    }
    tensors["h.0.attn.c_attn.weight"] = fused
    tensors["h.0.attn.c_attn.bias"] = np.arange(24, dtype=np.float32)
    save_as(tmp_path, tensors)
    weights = open_weights(tmp_path, what)
    np.testing.assert_array_equal(weights["layers.0.k.weight"].data, fused[:, 8:16].T)
    np.testing.assert_array_equal(weights["layers.0.v.bias"].data, np.arange(16, 24))


def test_layers_for_drafts_are_left_out_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    what = description()
    drafts = {name: np.zeros(4, np.float32) for name in ("mtp.fc.weight", "model.layers.1.eh_proj.weight")}
    save_as(tmp_path, random_tensors(what) | drafts)
    with caplog.at_level("INFO"):
        assert {*open_weights(tmp_path, what)} == {*what.tensors}
    assert [record.message for record in caplog.records] == [
        "2 tensors of layers that predict further tokens (MTP) are not loaded, because they are not used"
    ]


def test_a_tied_matrix_may_lie_under_either_name(tmp_path: Path) -> None:
    what = description(tie_word_embeddings=True)
    tensors = random_tensors(what)
    embedding = tensors["model.embed_tokens.weight"]
    save_as(tmp_path, {**tensors, "lm_head.weight": embedding})
    np.testing.assert_array_equal(open_weights(tmp_path, what)["embed.weight"].data, embedding)
    del tensors["model.embed_tokens.weight"]
    save_as(tmp_path, {**tensors, "lm_head.weight": embedding})
    np.testing.assert_array_equal(open_weights(tmp_path, what)["embed.weight"].data, embedding)
    save_as(tmp_path, {**tensors, "lm_head.weight": embedding, "model.embed_tokens.weight": embedding + 1})
    with pytest.raises(ModelError, match=r"tied, but lm_head.weight and model.embed_tokens.weight differ"):
        open_weights(tmp_path, what)


def test_a_head_of_its_own_must_be_there(tmp_path: Path) -> None:
    save_as(tmp_path, random_tensors(description(tie_word_embeddings=True)))
    with pytest.raises(ModelError, match=f"lm_head.weight is missing from .*{FILE}"):
        open_weights(tmp_path, description(tie_word_embeddings=False))


def test_a_wrong_shape_is_refused_with_both(tmp_path: Path) -> None:
    save_as(tmp_path, random_tensors(description()))
    with pytest.raises(ModelError, match=rf"{FILE}: tensor .*gate_proj.* has shape \(12, 8\).* needs \(16, 8\)"):
        open_weights(tmp_path, description(intermediate_size=16))


def test_a_dtype_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(description())
    save_as(tmp_path, {**tensors, "model.norm.weight": np.ones(8, np.int8)})
    with pytest.raises(ModelError, match=f"{FILE}: tensor model.norm.weight is stored as I8; .*BF16"):
        open_weights(tmp_path, description())


def test_pickle_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no weights"):
        open_weights(tmp_path, description())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(ModelError, match=r"pickle \(pytorch_model.bin\).* converts it to safetensors"):
        open_weights(tmp_path, description())


# The command imports torch.
def test_the_command_for_pickles_converts_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = tmp_path / "a model's"
    folder.mkdir()
    shared = torch.arange(6.0).reshape(2, 3)
    torch.save({"a.weight": shared, "b.weight": shared}, folder / "weights-1.bin")
    torch.save(["not weights"], folder / "training_args.bin")
    torch.save({"c.weight": shared.T.bfloat16()}, folder / "weights-2.bin")
    with pytest.raises(ModelError, match="pickle") as error:
        open_weights(folder, description())
    command = "python3 -c " + str(error.value).partition("python3 -c ")[2]
    subprocess.run(["sh", "-c", command.replace("python3", sys.executable, 1)], check=True)
    checkpoint = open_checkpoint(folder)
    assert {name: stored.shape for name, stored in checkpoint.items()} == {
        "a.weight": (2, 3),
        "b.weight": (2, 3),
        "c.weight": (3, 2),
    }


def test_an_unknown_load_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'npcache'.*auto, safetensors, pt, gguf, dummy"):
        open_source(str(tmp_path), load_format="npcache")


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, length: int) -> None:
    raw = save(random_tensors(description()))
    (tmp_path / FILE).write_bytes(raw[:length])
    with pytest.raises(ModelError, match=f"{FILE} is not a valid safetensors file"):
        open_weights(tmp_path, description())


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"data_offsets": [0, 1 << 60], "shape": [1 << 58]}, "overlap"),
        (
            {"shape": [1 << 60]},
            r"tensor 'model.norm.weight' has \d+ bytes, but its shape and type need 4.00 EiB",
        ),
        ({"shape": [1 << 60, 1 << 60]}, r"tensor 'model.norm.weight' has the shape \[\d+, \d+\], which is too large"),
        ({"shape": [1 << 60] * 300}, r"tensor 'model.norm.weight' has the shape \["),
        ({"shape": [-1]}, r"tensor 'model.norm.weight' has the shape \[-1\]"),
        ({"shape": None}, "tensor 'model.norm.weight' has the shape"),
        ({"data_offsets": [8]}, r"tensor 'model.norm.weight' has the offsets \[8\]"),
        ({"dtype": "F128"}, "tensor 'model.norm.weight' is stored as 'F128', which is not a type"),
        ({"data_offsets": [0, 32]}, "tensors '.*' and '.*' overlap"),
    ],
)
def test_a_tensor_that_lies_is_named(tmp_path: Path, entry: dict[str, Any], words: str) -> None:
    header = json.loads(RAW[8 : 8 + HEADER_BYTES])
    header["model.norm.weight"] |= entry
    said = json.dumps(header).encode()
    (tmp_path / FILE).write_bytes(len(said).to_bytes(8, "little") + said + RAW[8 + HEADER_BYTES :])
    with pytest.raises(ModelError, match=f"{FILE} is not a valid safetensors file.*{words}"):
        open_weights(tmp_path, description())


def test_a_file_that_is_cut_off_names_the_tensor_that_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(RAW[:-5])
    with pytest.raises(ModelError, match=f"{FILE} is not .* tensor '[a-z_.0-9]+' ends 5 bytes past its end"):
        open_weights(tmp_path, description())


RAW = save(random_tensors(description()))
HEADER_BYTES = int.from_bytes(RAW[:8], "little")


@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES + 7), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_corrupt_header_is_read_right_or_refused(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    raw = bytearray(RAW)
    for position, value in changes:
        raw[position] = value
    check_read_or_refused(tmp_path, bytes(raw))


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F16", "I64", "F4", "nonsense", 3, None]),
        "shape": st.lists(st.integers(-(2**63), 2**64) | st.integers(0, 20), max_size=3) | st.none(),
        "data_offsets": st.lists(st.integers(-8, 2**64) | st.integers(0, 2000), max_size=3) | st.text(max_size=2),
    },
)


@given(st.dictionaries(st.sampled_from(["model.norm.weight", "lm_head.weight", "x"]), ENTRY))
@settings(max_examples=70, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_header_with_other_entries_is_read_right_or_refused(tmp_path: Path, entries: dict[str, Any]) -> None:
    header = json.loads(RAW[8 : 8 + HEADER_BYTES])
    changed = json.dumps({**header, **{name: {**header.get(name, {}), **entry} for name, entry in entries.items()}})
    check_read_or_refused(tmp_path, len(changed).to_bytes(8, "little") + changed.encode() + RAW[8 + HEADER_BYTES :])


def check_read_or_refused(folder: Path, raw: bytes) -> None:
    (folder / FILE).write_bytes(raw)
    what = description()
    try:
        weights = open_weights(folder, what)
    except ModelError as error:
        message = str(error)
    else:
        for name, shape in tensor_shapes(what.spec).items():
            assert weights[name].data.shape == shape
            weights[name].data.tobytes()
        return
    assert FILE in message
