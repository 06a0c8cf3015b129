"""Folders of floats are written anew as quantized ones: what is in them, what is refused, and going on after a stop."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import models_zoo
import numpy as np
import pytest
from engine.weights.quantized.checkpoint_formats import FORMATS, Array, save
from numpy.typing import NDArray
from optional_packages import require_packages
from safetensors.numpy import load_file, save_file

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.quantizing.folder import quantize_folder
from tidewheel.engine.quantizing.layouts import FOLDER_METHODS, FolderMethod
from tidewheel.engine.quantizing.report import Report, TensorReport
from tidewheel.engine.quantizing.statistics import InputStatistics
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.tensor import QuantizedTensor, WeightSource, to_float32

METHODS = pytest.mark.parametrize("method", FOLDER_METHODS)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 64, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    **CONFIG, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    **CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
    "moe_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip
UP = "model.layers.0.mlp.up_proj"


def floats(config: Mapping[str, Any] = CONFIG, dtype: Any = ml_dtypes.bfloat16) -> dict[str, Array]:
    """A checkpoint of random weights."""
    random, tensors = np.random.default_rng(0), dict[str, Array]()
    description = describe(config)
    for name, shape in tensor_shapes(description.spec).items():
        tensors[description.tensors[name].name] = (random.standard_normal(shape) / 8).astype(dtype)
    return tensors


def model(folder: Path, config: Mapping[str, Any] = CONFIG, **changes: Array | None) -> Path:
    """A model folder; `changes` are tensors to add or, if None, to leave out, with `/` for a dot in their names."""
    changed = {name.replace("/", "."): array for name, array in changes.items()}
    tensors = {name: array for name, array in {**floats(config), **changed}.items() if array is not None}
    save(folder, config, tensors)
    return folder


class Text:
    """Statistics as of a text, the same for a name each time. `runs` are the names that were asked for in each run."""

    def __init__(self, config: Mapping[str, Any] = CONFIG, silent: Collection[str] = ()) -> None:
        self._shapes = tensor_shapes(describe(config).spec)
        self._silent = silent
        self.runs: list[list[str]] = []

    def gather(self, names: Collection[str], *, grams: bool = False) -> Mapping[str, InputStatistics]:
        self.runs.append(list(names))
        assert grams
        return {name: self._statistics(name) for name in names if name not in self._silent}

    def _statistics(self, name: str) -> InputStatistics:
        random, inputs = np.random.default_rng([*name.encode()]), self._shapes[name][1]
        x = random.standard_normal((256, inputs // 4)) @ random.standard_normal((inputs // 4, inputs))
        x = (x + random.standard_normal(x.shape)).astype(np.float32)
        gram = x.T @ x / len(x)
        return InputStatistics(len(x), gram.diagonal().copy(), gram)


def opened(folder: Path) -> WeightSource:
    source = open_source(str(folder))
    return source.weights(describe(source.config))


def stored(folder: Path) -> dict[str, Array]:
    """All tensors of a folder's safetensors, after its index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found = load_file(path)
        assert found.keys() == {name for name, file in index["weight_map"].items() if file == path.name}
        tensors |= found
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    return tensors


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def notes(report: Report) -> dict[str, str]:
    return {tensor.name: tensor.note for tensor in report.tensors if tensor.note is not None}


def matrices(report: Report) -> dict[str, TensorReport]:
    """The tensors that were quantized."""
    return {tensor.name: tensor for tensor in report.tensors if tensor.error is not None}


@METHODS
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_the_folder_has_the_weights_in_fewer_bits(tmp_path: Path, method: FolderMethod, dtype: Any) -> None:
    tensors = floats(dtype=dtype)
    save(tmp_path / "model", CONFIG, tensors)
    report = quantize_folder(tmp_path / "model", tmp_path / "out", method)
    weights, written = opened(tmp_path / "out"), stored(tmp_path / "out")
    for name, ref in describe(CONFIG).tensors.items():
        before, after = tensors[ref.name].astype(np.float32), weights[name]
        if name.startswith("layers.") and before.ndim == 2:
            assert isinstance(after, QuantizedTensor)
            assert after.bits == (8 if method == "int8" else 4)
            assert after.group_size == (before.shape[1] if method == "int8" else 64)
            lost = np.square(to_float32(after) - before).sum() / np.square(before).sum()
            assert matrices(report)[ref.name].error == pytest.approx(float(np.sqrt(lost)), rel=1e-3)
            assert lost < (1e-4 if method == "int8" else 0.015)
        else:
            np.testing.assert_array_equal(written[ref.name].astype(np.float32), before)
            assert written[ref.name].dtype == dtype
    assert report.num_bytes == sum(array.nbytes for array in written.values())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3  # a file for each layer, one for the others


def test_other_files_are_copied_and_other_weights_are_not(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    for name in ("tokenizer.json", "LICENSE", "extra/chat.jinja", ".gitattributes", ".cache/a.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"this is {name}")
    for name in ("pytorch_model.bin", "model.gguf", "model.safetensors.index.json", "onnx/model.onnx"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("old weights")
    (folder / "README.md").symlink_to(folder / "LICENSE")
    quantize_folder(folder, tmp_path / "out", "gptq")
    others = {name: text for name, text in contents(tmp_path / "out").items() if not name.startswith("model")}
    config = json.loads(others.pop("config.json"))
    assert others == {
        "tokenizer.json": b"this is tokenizer.json",
        "LICENSE": b"this is LICENSE",
        "README.md": b"this is LICENSE",
        "extra/chat.jinja": b"this is extra/chat.jinja",
    }
    assert config.pop("quantization_config")["quant_method"] == "gptq"
    assert config == CONFIG


@pytest.mark.parametrize(
    ("sizes", "group"),
    [
        ({"hidden_size": 128, "intermediate_size": 256}, 128),
        ({"hidden_size": 128, "intermediate_size": 192}, 64),
        ({"hidden_size": 128, "intermediate_size": 416}, 32),
    ],
)
def test_all_matrices_have_groups_of_one_size(tmp_path: Path, sizes: Mapping[str, int], group: int) -> None:
    report = quantize_folder(model(tmp_path / "model", {**CONFIG, **sizes}), tmp_path / "out", "gptq")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["group_size"] == group
    assert {tensor.format for tensor in matrices(report).values()} == {f"int4 in groups of {group}"}
    assert len(matrices(report)) == 14


def test_matrices_that_kernels_do_not_take_stay_and_so_do_those_joined_with_them(tmp_path: Path) -> None:
    config = {**CONFIG, "num_key_value_heads": 1, "intermediate_size": 200}
    report = quantize_folder(model(tmp_path / "model", config), tmp_path / "out", "awq")
    layer = {name.removeprefix("model.layers.0."): note for name, note in notes(report).items() if ".0." in name}
    assert layer == {
        "self_attn.q_proj.weight": "other servers join it with model.layers.0.self_attn.k_proj, which is not quantized",
        "self_attn.k_proj.weight": "32 outputs, which are no multiple of 64",
        "self_attn.v_proj.weight": "32 outputs, which are no multiple of 64",
        "mlp.gate_proj.weight": "200 outputs, which are no multiple of 64",
        "mlp.up_proj.weight": "200 outputs, which are no multiple of 64",
        "mlp.down_proj.weight": "200 inputs, which are no multiple of 32",
    }
    assert matrices(report).keys() == {f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 1)}
    kept = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {name.removesuffix(".weight") for name in notes(report)} <= {*kept}
    assert opened(tmp_path / "out").stored_format("layers.0.o.weight") is not None


def test_a_matrix_stays_where_the_model_leaves_out_one_that_is_joined_with_it(tmp_path: Path) -> None:
    require_packages("transformers")
    config = models_zoo.config_json(models_zoo.CASES["gemma3n"])  # its last two layers read the K and V of others
    tensors, unused = floats(config), "model.layers.5.self_attn.k_proj.weight"
    save(tmp_path / "model", config, {**tensors, unused: tensors[unused.replace("5", "3")]})
    report = quantize_folder(tmp_path / "model", tmp_path / "out", "int8")
    found = {name.split(".")[2] for name in matrices(report) if name.endswith("self_attn.q_proj.weight")}
    assert found == {"0", "1", "2", "3", "4"}
    assert notes(report)["model.layers.5.self_attn.q_proj.weight"] == (
        "other servers join it with model.layers.5.self_attn.k_proj, which is not quantized"
    )
    assert is_kept("model.layers.5.self_attn.k_proj", "int8", tmp_path / "out")
    assert not is_kept("model.layers.3.self_attn.k_proj", "int8", tmp_path / "out")


@METHODS
def test_experts_are_quantized_and_routers_are_not(tmp_path: Path, method: FolderMethod) -> None:
    report = quantize_folder(model(tmp_path / "model", MIXTRAL), tmp_path / "out", method)
    assert len(matrices(report)) == 2 * (4 + 4 * 3)
    router = "model.layers.1.block_sparse_moe.gate.weight"
    assert notes(report) == dict.fromkeys((router, router.replace("1", "0")), "a router, which would choose others")
    assert opened(tmp_path / "out").stored_format("layers.1.experts.3.down.weight") is not None


@METHODS
def test_experts_in_one_tensor_stay(tmp_path: Path, method: FolderMethod) -> None:
    tensors = floats(QWEN3_MOE)
    for layer in (0, 1):
        block = f"model.layers.{layer}.mlp.experts"
        parts = [[tensors.pop(f"{block}.{i}.{name}_proj.weight") for i in range(4)] for name in ("gate", "up", "down")]
        gate, up, down = (np.stack(part) for part in parts)
        tensors |= {f"{block}.gate_up_proj": np.concatenate([gate, up], 1), f"{block}.down_proj": down}
    save(tmp_path / "model", QWEN3_MOE, tensors)
    report = quantize_folder(tmp_path / "model", tmp_path / "out", method)
    assert len(matrices(report)) == 2 * 4
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    assert notes(report)[stack] == f"a stack of experts, for which {method} has no form"
    np.testing.assert_array_equal(stored(tmp_path / "out")[stack], tensors[stack])
    assert is_kept("model.layers.0.mlp.experts", method, tmp_path / "out")
    assert is_kept("model.layers.0.mlp.experts.2.up_proj", method, tmp_path / "out")


def is_kept(module: str, method: FolderMethod, folder: Path) -> bool:
    """Whether vLLM and transformers take a module for one in floats, by the folder's config."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    if method == "gptq":
        return any(re.match(pattern.removeprefix("-:"), module) for pattern in config["dynamic"])
    if method == "int8":
        return any(re.match(name.removeprefix("re:"), module) for name in config["ignore"])
    return any(name in module for name in config["modules_to_not_convert"])


@METHODS
@pytest.mark.parametrize("config", [CONFIG, MIXTRAL, QWEN3_MOE, {**CONFIG, "tie_word_embeddings": True}])
def test_configs_name_all_linear_layers_that_are_not_quantized(
    tmp_path: Path, method: FolderMethod, config: Mapping[str, Any]
) -> None:
    quantize_folder(model(tmp_path / "model", config), tmp_path / "out", method)
    quantized = {name.rpartition(".")[0] for name, array in stored(tmp_path / "out").items() if array.dtype.kind == "i"}
    modules = {name.removesuffix(".weight") for name, array in floats(config).items() if array.ndim == 2} | {"lm_head"}
    assert {name for name in modules if not is_kept(name, method, tmp_path / "out")} == quantized


def test_transformers_finds_the_same_layers_in_an_awq_folder(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    require_packages("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.quantizers.quantizers_utils import should_convert_module

    config = {**CONFIG, "model_type": "llama", "intermediate_size": 200}
    quantize_folder(model(tmp_path / "model", config), tmp_path / "out", "awq")
    found = AutoConfig.from_pretrained(tmp_path / "out")
    kept = found.quantization_config["modules_to_not_convert"]
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(found).named_modules()
    linear = {name for name, module in layers if isinstance(module, torch.nn.Linear)}
    quantized = {name.removesuffix(".qweight") for name in stored(tmp_path / "out") if name.endswith(".qweight")}
    assert len(quantized) == 8
    assert {name for name in linear if should_convert_module(name, kept)} == quantized


def test_other_parts_of_a_model_are_copied(tmp_path: Path) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {**CONFIG, "model_type": "llama"}}
    tensors = {f"language_model.{name}": array for name, array in floats().items()}
    vision = {
        "vision_tower.layers.0.fc1.weight": np.ones((64, 64), ml_dtypes.bfloat16),
        "vision_tower.patches.weight": np.ones((64, 3, 4, 4), np.float16),
        "vision_tower.position_ids": np.arange(3),
    }
    save(tmp_path / "model", config, {**tensors, **vision})
    report = quantize_folder(tmp_path / "model", tmp_path / "out", "gptq")
    written = stored(tmp_path / "out")
    for name, array in vision.items():
        np.testing.assert_array_equal(written[name], array)
    assert len(matrices(report)) == 14
    assert is_kept("vision_tower.layers.0.fc1", "gptq", tmp_path / "out")
    assert isinstance(opened(tmp_path / "out")["layers.1.down.weight"], QuantizedTensor)


@METHODS
def test_a_text_makes_outputs_nearer(tmp_path: Path, method: FolderMethod) -> None:
    folder, text = model(tmp_path / "model"), Text()
    report = quantize_folder(folder, tmp_path / "out", method, text)
    quantize_folder(folder, tmp_path / "nearest", method)
    near, nearest, before = (opened(path) for path in (tmp_path / "out", tmp_path / "nearest", folder))
    for name in ("layers.0.q.weight", "layers.1.down.weight"):
        gram = text.gather([name], grams=True)[name].gram
        assert gram is not None

        def error(weights: WeightSource, name: str = name, gram: NDArray[np.float32] = gram) -> float:
            exact = to_float32(before[name])
            lost, whole = (np.trace(w @ gram @ w.T) for w in (to_float32(weights[name]) - exact, exact))
            return float(np.sqrt(lost / whole))

        assert error(near) < 0.8 * error(nearest)
        reported = matrices(report)[describe(CONFIG).tensors[name].name].error
        assert reported == pytest.approx(error(near), rel=0.02)


def test_matrices_that_read_the_same_are_asked_for_once(tmp_path: Path) -> None:
    text = Text()
    quantize_folder(model(tmp_path / "model"), tmp_path / "out", "gptq", text)
    layer = ["q", "o", "gate", "down"]
    assert text.runs == [[f"layers.{i}.{name}.weight" for i in (0, 1) for name in layer]]


@pytest.mark.parametrize(("num_bytes", "runs"), [(0, 8), (3 * 64 * 64 * 4, 4), (3 * 64 * 64 * 4 + 192 * 192 * 4, 2)])
def test_a_run_gathers_what_memory_has_room_for(tmp_path: Path, num_bytes: int, runs: int) -> None:
    folder, text, whole = model(tmp_path / "model"), Text(), Text()
    quantize_folder(folder, tmp_path / "out", "gptq", text, gram_bytes=num_bytes)
    quantize_folder(folder, tmp_path / "whole", "gptq", whole)
    assert len(text.runs) == runs
    assert [name for names in text.runs for name in names] == whole.runs[0]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_report_names_matrices_that_no_token_reached(tmp_path: Path) -> None:
    silent = [f"layers.0.experts.2.{name}.weight" for name in ("gate", "down")]
    report = quantize_folder(model(tmp_path / "model", MIXTRAL), tmp_path / "out", "gptq", Text(MIXTRAL, silent))
    expert = "model.layers.0.block_sparse_moe.experts.2"
    said = {name for name, note in notes(report).items() if note == "the text says nothing about its inputs"}
    assert said == {f"{expert}.{name}.weight" for name in ("w1", "w2", "w3")}


class StoppedError(Exception):
    """As if the process had ended."""


def test_work_goes_on_after_a_stop_anywhere(tmp_path: Path, monkeypatch: Any) -> None:
    folder = model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    report = quantize_folder(folder, tmp_path / "whole", "gptq", Text(), text_identity="a")
    replace, left = os.replace, 0

    def stopping(source: Path, target: Path) -> None:
        nonlocal left
        if left == 0:
            raise StoppedError
        left -= 1
        replace(source, target)

    monkeypatch.setattr(os, "replace", stopping)
    for stop in range(100):
        out, left = tmp_path / f"out-{stop}", stop
        try:
            quantize_folder(folder, out, "gptq", Text(), text_identity="a")
        except StoppedError:
            assert not (out / "config.json").exists()
        else:
            break
        left = 100
        assert quantize_folder(folder, out, "gptq", Text(), text_identity="a") == report
        assert contents(out) == contents(tmp_path / "whole")
    assert stop == 10  # three shards, the journal before and behind each, and three files


def test_finished_shards_are_kept(tmp_path: Path) -> None:
    folder, text = model(tmp_path / "model"), Text()

    def stop(done: int, whole: int) -> None:
        if done > whole // 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        quantize_folder(folder, tmp_path / "out", "gptq", text, gram_bytes=0, on_progress=stop)
    first = tmp_path / "out" / "model-00001-of-00003.safetensors"
    written = first.stat().st_mtime_ns
    text.runs.clear()
    progress: list[tuple[int, int]] = []
    quantize_folder(folder, tmp_path / "out", "gptq", text, gram_bytes=0, on_progress=lambda *at: progress.append(at))
    assert first.stat().st_mtime_ns == written
    assert [name for names in text.runs for name in names] == [
        f"layers.1.{name}.weight" for name in ("q", "o", "gate", "down")
    ]
    assert progress[-1][0] == progress[-1][1] == sum(array.nbytes for array in floats().values())
    assert progress == sorted(progress)


def stopped(folder: Path, out: Path, **options: Any) -> None:
    """Leave a folder whose first shard is finished."""

    def stop(done: int, whole: int) -> None:
        if done > whole // 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        quantize_folder(folder, out, "gptq", on_progress=stop, **options)


def test_a_finished_shard_that_was_damaged_is_written_again(tmp_path: Path) -> None:
    folder, out = model(tmp_path / "model"), tmp_path / "out"
    quantize_folder(folder, tmp_path / "whole", "gptq")
    stopped(folder, out)
    shard = out / "model-00001-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    quantize_folder(folder, out, "gptq")
    assert contents(out) == contents(tmp_path / "whole")


def test_work_is_not_continued_with_other_settings(tmp_path: Path) -> None:
    folder, out = model(tmp_path / "model"), tmp_path / "out"
    stopped(folder, out)
    with pytest.raises(ModelError, match=r"begun with other settings \(method was 'gptq', is 'awq'\)"):
        quantize_folder(folder, out, "awq")
    with pytest.raises(ModelError, match="calibration text was '', is 'a book'"):
        quantize_folder(folder, out, "gptq", Text(), text_identity="a book")
    save_file({**floats(), "model.norm.weight": np.ones(64, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="model was"):
        quantize_folder(folder, out, "gptq")


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    folder, out = model(tmp_path / "model"), tmp_path / "out"

    def start_another(done: int, whole: int) -> None:
        quantize_folder(folder, out, "gptq")

    with pytest.raises(ModelError, match="out is being written by another process: wait until it has ended"):
        quantize_folder(folder, out, "gptq", on_progress=start_another)
    assert matrices(quantize_folder(folder, out, "gptq"))


def test_a_full_disk_is_named_and_work_goes_on_later(tmp_path: Path, monkeypatch: Any) -> None:
    folder, out, sync, left = model(tmp_path / "model"), tmp_path / "out", os.fsync, 3

    def full(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match="json cannot be written: No space left on device"):
        quantize_folder(folder, out, "gptq")
    quantize_folder(folder, out, "gptq")
    quantize_folder(folder, tmp_path / "whole", "gptq")
    assert contents(out) == contents(tmp_path / "whole")


def test_a_shard_that_reads_otherwise_is_not_finished(tmp_path: Path, monkeypatch: Any) -> None:
    from tidewheel.engine.quantizing import folder as module

    write = module.write_safetensors

    def write_badly(path: Path, tensors: Any) -> str:
        digest = write(path, tensors)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return digest

    monkeypatch.setattr(module, "write_safetensors", write_badly)
    with pytest.raises(ModelError, match="was not written as it was meant: check the disk"):
        quantize_folder(model(tmp_path / "model"), tmp_path / "out", "int8")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    folder, out = model(tmp_path / "model"), tmp_path / "out"

    def refused(words: str, source: Path = folder, target: Path = out, method: FolderMethod = "gptq") -> None:
        with pytest.raises(ModelError, match=words):
            quantize_folder(source, target, method)
        assert not out.exists()

    done = tmp_path / "done"
    quantize_folder(folder, done, "gptq")
    refused(r"done is quantized already, by gptq \(bits 4, group_size 64.*\): take the folder of floats", done)
    refused("done is there already", target=done)
    (tmp_path / "file").write_text("")
    refused("file is there already", target=tmp_path / "file")
    refused("lies in the model's own folder", target=folder)
    refused("lies in the model's own folder", target=folder / "quantized")
    gguf = tmp_path / "gguf"
    gguf.mkdir()
    (gguf / "model.gguf").write_bytes(b"GGUF")
    refused("gguf is not a Hugging Face folder: take the folder of floats", gguf)
    refused("model.gguf is not a Hugging Face folder: take the folder of floats", gguf / "model.gguf")
    refused("is not a folder", tmp_path / "nothing")
    small = model(tmp_path / "small", {**CONFIG, "hidden_size": 40, "intermediate_size": 40, "num_attention_heads": 1,
                                       "num_key_value_heads": 1})  # fmt: skip
    refused("has no matrix that awq has a form for: .* is 40 inputs, which are no multiple of 32", small, method="awq")


def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    weight = floats()[f"{UP}.weight"].copy()
    weight[3, 4] = np.nan
    folder = model(tmp_path / "model", **{f"{UP}.weight": weight})
    with pytest.raises(ModelError, match=f"tensor {UP}.weight has 1 value that is not finite"):
        quantize_folder(folder, tmp_path / "out", "gptq")

    class Overflown(Text):
        def _statistics(self, name: str) -> InputStatistics:
            statistics = super()._statistics(name)
            statistics.squares[0] = np.inf
            assert statistics.gram is not None
            statistics.gram[0, 0] = np.inf
            return statistics

    with pytest.raises(ModelError, match=r"layers\.0\.q\.weight that are infinite or NaN: take another text"):
        quantize_folder(model(tmp_path / "whole"), tmp_path / "out-2", "gptq", Overflown())


def test_pytorch_files_are_read_where_there_are_no_safetensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = model(tmp_path / "model")
    quantize_folder(folder, tmp_path / "out", "gptq")
    tensors = {name: torch.from_numpy(array.astype(np.float32)).bfloat16() for name, array in floats().items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    quantize_folder(folder, tmp_path / "out-2", "gptq")
    assert contents(tmp_path / "out") == contents(tmp_path / "out-2")


def test_the_formats_here_are_all_that_are_already_quantized(tmp_path: Path) -> None:
    for kind in ("awq", "int8", "fp8", "nf4"):
        save(tmp_path / kind, {**CONFIG, "quantization_config": FORMATS[kind].config}, floats())
        with pytest.raises(ModelError, match="is quantized already"):
            quantize_folder(tmp_path / kind, tmp_path / "out", "gptq")
