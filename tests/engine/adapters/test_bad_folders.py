"""Adapter folders that cannot be served end in one sentence that says what to do."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lora_files
import numpy as np
import pytest

from tidewheel.engine.adapters.peft_folder import read_peft_folder
from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.weights.checkpoint import open_copy

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}  # fmt: skip
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def read(folder: Path, max_rank: int = 16) -> Any:
    return read_peft_folder(folder, describe(LLAMA, None), max_rank)


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ModelError) as failure:
        read(folder)
    message = str(failure.value)
    assert "\n" not in message
    assert len(message) < 700
    for word in words:
        assert word in message


def test_the_folders_here_are_fine_as_they_are(tmp_path: Path) -> None:
    adapter = read(lora_files.write(tmp_path))
    assert adapter.rank == 4
    assert [update.name for update in adapter.updates] == ["layers.0.q", "layers.0.v", "layers.1.q", "layers.1.v"]
    assert all(update.scale == 2 for update in adapter.updates)
    assert read(lora_files.write(tmp_path)).digest == adapter.digest
    assert read(lora_files.write(tmp_path, lora_alpha=9)).digest != adapter.digest


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, ["peft_type must be LORA", "IA3"]),
        ({"peft_type": None}, ["peft_type must be LORA"]),
        ({"use_dora": True}, ["DoRA"]),
        ({"modules_to_save": ["score"]}, ["modules_to_save", "score", "embed_tokens and lm_head", "Merge"]),
        ({"modules_to_save": ["lm_head", "model.norm"]}, ["modules_to_save", "model.norm"]),
        ({"modules_to_save": "lm_head"}, ["modules_to_save must be a list"]),
        ({"target_parameters": "mlp.experts.gate_up_proj"}, ["target_parameters must be a list"]),
        ({"bias": "boft_only"}, ["bias must be one of none, lora_only, all", "boft_only"]),
        ({"bias": ["all"]}, ["bias must be one of"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["path_initial_model_for_weight_conversion"]),
        ({"lora_alpha": "much"}, ["lora_alpha must be a number"]),
        ({"lora_alpha": 1e300}, ["lora_alpha must be a number"]),
        ({"alpha_pattern": {"(a+)+b": 1}}, ["could take long to match"]),
        ({"alpha_pattern": {r"(.)\1": 1}}, ["could take long to match"]),
        ({"alpha_pattern": {".*.*.*.*q": 1}}, ["more than 3 repeats"]),
        ({"alpha_pattern": {"(": 1}}, ["not a regular expression"]),
        ({"alpha_pattern": {"q_proj": None}}, ["must be a number"]),
        ({"alpha_pattern": [1]}, ["must be an object"]),
    ],
    ids=str,
)
def test_a_config_that_asks_for_more_is_refused(tmp_path: Path, config: dict[str, Any], words: list[str]) -> None:
    folder = lora_files.write(tmp_path)
    (folder / "adapter_config.json").write_text(lora_files.json.dumps({**lora_files.CONFIG, **config}))
    refused(folder, *words)


Change = Callable[[dict[str, Any]], None]


def _set(name: str, value: Any) -> Change:
    return lambda tensors: tensors.__setitem__(f"{Q}.{name}", value)


def _whole(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.__setitem__(f"base_model.model.model.{name}", np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("lora_A.weight", np.zeros((4, 63), np.float32)), ["do not fit the model"]),
        (_set("lora_A.weight", np.zeros((0, 64), np.float32)), ["do not fit the model"]),
        (_set("lora_A.weight", np.zeros(64, np.float32)), ["do not fit the model"]),
        (_set("lora_B.weight", np.zeros((65, 4), np.float32)), ["do not fit the model"]),
        (_set("lora_B.weight", np.zeros((64, 5), np.float32)), ["do not fit the model"]),
        (_set("lora_B.bias", np.zeros(5, np.float32)), ["self_attn.q_proj.lora_B.bias has shape"]),
        (_set("lora_A.weight", np.full((4, 64), np.nan, np.float32)), ["not finite"]),
        (_set("lora_B.weight", np.full((64, 4), np.inf, np.float32)), ["not finite"]),
        (_set("lora_A.weight", np.zeros((4, 64), np.int32)), ["stored as I32"]),
        (_set("lora_magnitude_vector", np.zeros(64, np.float32)), ["is not an A or B"]),
        (_set("base_layer.weight", np.zeros(64, np.float32)), ["is not an A or B"]),
        (lambda tensors: tensors.pop(f"{Q}.lora_B.weight"), ["has no lora_B.weight"]),
        (lambda tensors: tensors.clear(), ["has no tensors"]),
        (
            lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": np.zeros((4, 64), np.float32)}),
            ["lm_head", "has no lora_B.weight"],
        ),
        (_whole("embed_tokens.lora_A.weight", 4, 64), ["embed_tokens", "is not an A or B"]),
        (_whole("embed_tokens.lora_embedding_A", 4, 320), ["embed_tokens", "has no lora_embedding_B"]),
        (_whole("embed_tokens.weight", 321, 64), ["embed_tokens", "(321, 64)", "cannot add tokens"]),
        (_whole("embed_tokens.base_layer.weight", 320, 63), ["embed_tokens", "(320, 63)"]),
        (_whole("norm.weight", 64), ["norm", "cannot be changed"]),
        (_whole("layers.0.mlp.experts.0.up_proj.lora_A.weight", 4, 64), ["experts.0", "cannot be changed", "Merge"]),
        (
            lambda tensors: tensors.update({"base_model.model.lm_head.weight": np.full((320, 64), np.inf, np.float32)}),
            ["lm_head", "not finite"],
        ),
        (
            lambda tensors: tensors.update({Q.replace("0", "7") + ".lora_A.weight": np.zeros((4, 64), np.float32)}),
            ["layers.7", "cannot be changed"],
        ),
        (
            lambda tensors: tensors.update(lora_files.tensors(rank=17)),
            ["rank 17", "--max-lora-rank 16"],
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: Change, words: list[str]) -> None:
    tensors = lora_files.tensors()
    change(tensors)
    refused(lora_files.write(tmp_path, tensors), *words)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere does not exist")
    (tmp_path / "adapter.bin").touch()
    refused(tmp_path / "adapter.bin", "is neither a folder nor a .gguf file")
    refused(tmp_path, "adapter_config.json")
    folder = lora_files.write(tmp_path / "adapter")
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    refused(folder, "truncated or corrupt")
    weights.write_bytes(b"")
    refused(folder, "is empty")
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'echo'\ntR.")
    refused(folder, "pickle", "never loaded")
    os.mkfifo(weights)
    refused(folder, "named pipe")
    (folder / "adapter_config.json").write_text("[" * 1000)
    refused(folder, "not valid JSON")


def test_many_patterns_take_no_time_to_speak_of(tmp_path: Path) -> None:
    patterns = {f".*a.*{i}.*b": 1 for i in range(200)}
    assert read(lora_files.write(tmp_path, alpha_pattern=patterns)).rank == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"peft_type": "LORA", "x": ' + "[" * 4000 + "]" * 4000 + "}", "not valid JSON"),
        ('{"peft_type": "LORA", "x": [' + "[]," * 4096 + "[]]}", "more than 4096 objects and lists"),
        ('{"peft_type": "LORA", "x": "' + "a" * 2**20 + '"}', "may have at most 1 MiB"),
        ('{"peft_type": "LORA", "lora_alpha": NaN}', "lora_alpha must be a number"),
        ('{"peft_type": "LORA", "lora_alpha": Infinity}', "lora_alpha must be a number"),
        ('{"peft_type": "LORA", "lora_alpha": 1' + "0" * 5000 + "}", "lora_alpha must be a number|not valid JSON"),
        ('{"peft_type": "LORA", "lora_alpha": true}', "lora_alpha must be a number"),
        ('{"peft_type": "LORA", "lora_alpha": 8, "alpha_pattern": {"q": NaN}}', "must be a number"),
        ('{"peft_type": "LORA", "lora_alpha": 8, "bias": NaN}', "bias must be one of"),
        ('{"peft_type": {"LORA": 1}}', "peft_type must be LORA"),
        ('["LORA"]', "must hold a JSON object"),
        ('{"peft_type": "LORA", "lora_alpha": "\\ud800"}', "not valid JSON"),
        ("\xff\xfe", "not valid JSON"),
    ],
    ids=range(13),
)
def test_hostile_configs_are_refused_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    folder = lora_files.write(tmp_path)
    (folder / "adapter_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=words) as failure:
        read(folder)
    assert len(str(failure.value)) < 700


@pytest.mark.parametrize("fields", [{"r": 10**9}, {"r": -1}, {"rank_pattern": {"q_proj": 10**9}}, {"r": None}], ids=str)
def test_ranks_are_what_the_tensors_say(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert read(lora_files.write(tmp_path, **fields)).rank == 4


def test_a_header_that_promises_huge_tensors_takes_no_memory(tmp_path: Path) -> None:
    folder = lora_files.write(tmp_path)
    name = f"{Q}.lora_A.weight"
    header = lora_files.json.dumps({name: {"dtype": "F32", "shape": [2**40, 64], "data_offsets": [0, 2**48]}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)
    refused(folder, "truncated or corrupt")


def _with_header(folder: Path, header: bytes, data: bytes = b"") -> Path:
    weights = lora_files.write(folder) / "adapter_model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{}" + b" " * (8 << 20), "more than the 8 MiB"),
        (b'{"' + b"a" * 2000 + b'": {}}', "not a valid safetensors file"),
        (b'{"a": [' + b"[]," * 10_000 + b"[]]}", "not a valid safetensors file"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},' * 2, "twice|not a valid"),
        (b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}} x', "after its header"),
        (b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}', "not valid JSON"),
        (b"[]", "not valid JSON"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "behind its last tensor"),
        (b"\xff" * 8, "not a valid safetensors file"),
    ],
    ids=range(9),
)
def test_hostile_headers_are_refused(tmp_path: Path, header: bytes, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read(_with_header(tmp_path, header, b"\0" * 8))


def test_a_header_of_many_tensors_leaves_the_garbage_collector_nothing_to_look_at(tmp_path: Path) -> None:
    """It holds the interpreter's lock while it looks at all that is there."""
    one = b'"%d": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    folder = _with_header(tmp_path, b"{" + b",".join(one % i for i in range(20_000)) + b"}")
    before = len(gc.get_objects())
    opened = open_copy(folder / "adapter_model.safetensors", 20_000)
    assert len(opened) == 20_000
    assert len(gc.get_objects()) < before + 1000
    refused(folder, "it has more than the", "tensors that an adapter of this model may have")


def test_a_header_may_have_spaces_and_metadata(tmp_path: Path) -> None:
    folder = lora_files.write(tmp_path)
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = lora_files.json.loads(content[8 : 8 + length])
    said = lora_files.json.dumps({"__metadata__": {"a": "b" * 10_000}, **header}, indent=1).encode() + b" " * 9
    digest = read(folder).digest
    weights.write_bytes(len(said).to_bytes(8, "little") + said + content[8 + length :])
    assert read(folder).digest == digest


def test_files_without_a_size_are_never_opened(tmp_path: Path) -> None:
    """Some files of the system have no end, and reading them waits for ever."""
    folder = lora_files.write(tmp_path)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).unlink()
        (folder / name).symlink_to("/proc/self/mounts")  # which has content
        refused(folder, "is empty" if name.endswith("safetensors") else "not valid JSON")
