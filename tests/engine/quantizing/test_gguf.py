"""GGUF files that are written are read by the gguf package, and stand for what they were made of."""

from __future__ import annotations

import functools
import io
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import models_zoo
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from harness import Harness, load, make_device
from numpy.typing import NDArray
from optional_packages import require_packages

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.quantizing.gguf import quantize_gguf
from tidewheel.engine.quantizing.report import Report
from tidewheel.engine.quantizing.statistics import InputStatistics
from tidewheel.engine.weights.block_mix import BLOCK_MIXES, BlockMix
from tidewheel.engine.weights.gguf.source import GgufSource

pytest.importorskip("tidewheel._native")
pytest.importorskip("torch")
require_packages("transformers")


class Known:
    """A calibration that saw inputs whose squares are these, of the matrices with these ends of their names."""

    def __init__(self, squares: NDArray[np.float32], *ends: str) -> None:
        self._squares, self._ends = squares, ends

    def gather(self, names: Collection[str], *, grams: bool = False) -> Mapping[str, InputStatistics]:
        return {name: InputStatistics(9, self._squares) for name in names if name.endswith(self._ends)}


@functools.cache
def made(name: str, kind: Type = Type.F32, **sizes: int) -> Path:
    """A GGUF file of a tiny model. `sizes` are fields of its config."""
    folder = models_zoo.new_folder("-".join([name, kind.name, *map(str, sizes.values()), "gguf"]))
    case = models_zoo.CASES[name]
    model = models_zoo.build(models_zoo.Case(case.model_type, {**case.config, **sizes}))
    quantize = gguf_files.as_float32 if kind == Type.F32 else gguf_files.quantized(kind)
    return gguf_files.write(folder / "model.gguf", model, models_zoo.train_tokenizer(), quantize=quantize)


@functools.cache
def for_llama_cpp() -> Path:
    """A file of whole super-blocks, whose embedding has a row for each token: llama.cpp refuses more."""
    case, tokenizer = models_zoo.CASES["llama"], models_zoo.train_tokenizer()
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    model = models_zoo.build(models_zoo.Case(case.model_type, {**case.config, **sizes}))
    model.resize_token_embeddings(len(tokenizer))
    return gguf_files.write(models_zoo.new_folder("llama-cpp-gguf") / "model.gguf", model, tokenizer)


def quantized(path: Path, out: Path, mix: BlockMix, **options: Any) -> Report:
    source = GgufSource(path)
    return quantize_gguf(source, describe(source.config), out, mix, **options)


def tensors(path: Path) -> dict[str, tuple[str, NDArray[np.float32]]]:
    """What the gguf package finds: the type of each tensor, and its numbers."""
    return {
        tensor.name: (tensor.tensor_type.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }


def metadata(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.mark.parametrize(
    "name", ["llama", "mixtral", "gpt2", "qwen3_next-experts", "gemma3n", "deepseek-v3", "nemotron-h-experts"]
)
def test_the_gguf_package_reads_it(name: str, tmp_path: Path) -> None:
    path, out = made(name), tmp_path / "out.gguf"
    report = quantized(path, out, "q8_0")
    before, after = tensors(path), tensors(out)
    assert list(after) == list(before) == [tensor.name for tensor in report.tensors]
    changed = 0
    for tensor in report.tensors:
        (_, exact), (kind, found) = before[tensor.name], after[tensor.name]
        assert (kind, found.shape) == (tensor.format, tensor.shape)
        if tensor.error is None:
            np.testing.assert_array_equal(found, exact)
            assert tensor.note is not None or len(tensor.shape) == 1
        else:
            changed += 1
            error = np.sqrt(((found - exact) ** 2).sum() / (exact**2).sum())
            assert tensor.error == pytest.approx(float(error), rel=1e-3)
            assert error < 0.006
    assert changed >= 8
    assert metadata(out) == {
        **{key: value for key, value in metadata(path).items() if key != "GGUF.tensor_count"},
        "GGUF.tensor_count": len(after),
        "GGUF.kv_count": len(metadata(out)) - 3,
        "general.file_type": gguf.LlamaFileType.MOSTLY_Q8_0,
        "general.quantization_version": 2,
    }
    source = GgufSource(out)
    weights = source.weights(describe(source.config))
    assert all(weights[weight] is not None for weight in weights)


@pytest.mark.parametrize("mix", BLOCK_MIXES)
def test_llama_cpp_computes_the_same(mix: BlockMix, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    from peer_runners.llama_cpp_logits import write_logits

    out = tmp_path / "out.gguf"
    quantized(for_llama_cpp(), out, mix)
    tokens, found = list(range(3, 60)), io.BytesIO()
    write_logits(out, 1, [tokens], found)
    ours = Harness(load(make_device("cpu"), out)).logits(tokens)
    theirs = np.frombuffer(found.getvalue(), np.float32).reshape(ours.shape)
    # Both round activations to 8 bits, each in its own way, and random weights make more of that than trained ones.
    difference = np.sqrt(np.square(ours - theirs).mean() / np.square(theirs).mean())
    assert difference < 0.1


def test_types_are_mixed(tmp_path: Path) -> None:
    path, out = made("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=8), tmp_path / "out.gguf"
    quantized(path, out, "q4_k_m")
    kinds = {name: kind for name, (kind, _) in tensors(out).items()}
    finer = {layer for layer in range(8) if kinds[f"blk.{layer}.attn_v.weight"] == "Q6_K"}
    assert finer == {0, 3, 6, 7}
    assert {layer for layer in range(8) if kinds[f"blk.{layer}.ffn_down.weight"] == "Q6_K"} == finer
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"] == "Q4_K"
    assert kinds["output.weight"] == "Q6_K"
    assert kinds["output_norm.weight"] == "F32"


def test_what_is_in_blocks_already_is_copied_or_quantized_again(tmp_path: Path) -> None:
    path = made("llama", Type.Q4_0)
    report = quantized(path, tmp_path / "same.gguf", "q4_0")
    before, after = tensors(path), tensors(tmp_path / "same.gguf")
    same = [tensor.name for tensor in report.tensors if tensor.error is None]
    assert len(same) == len(report.tensors) - 1  # the head has more bits
    assert all(np.array_equal(before[name][1], after[name][1]) for name in same)
    quantized(path, tmp_path / "finer.gguf", "q8_0")
    assert tensors(tmp_path / "finer.gguf")["blk.0.attn_q.weight"][0] == "Q8_0"


def test_inputs_that_count_more_are_met_better(tmp_path: Path) -> None:
    path = made("llama", num_hidden_layers=1)
    squares = np.where(np.arange(64) % 8 == 0, 900, 1).astype(np.float32)
    quantized(path, tmp_path / "plain.gguf", "q4_0")
    report = quantized(path, tmp_path / "seen.gguf", "q4_0", calibration=Known(squares, "q.weight", "gate.weight"))
    exact, plain, seen = (tensors(file) for file in (path, tmp_path / "plain.gguf", tmp_path / "seen.gguf"))
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_gate.weight"):
        plain_error, seen_error = (
            float(((found[name][1] - exact[name][1]) ** 2 @ squares).sum()) for found in (plain, seen)
        )
        assert seen_error < 0.8 * plain_error
    assert np.array_equal(plain["blk.0.attn_k.weight"][1], seen["blk.0.attn_k.weight"][1])
    notes = {tensor.name: tensor.note for tensor in report.tensors}
    assert notes["blk.0.attn_q.weight"] is None
    assert notes["blk.0.attn_k.weight"] == "the text says nothing about its inputs"


def test_each_expert_counts_by_its_own_inputs(tmp_path: Path) -> None:
    path = made("mixtral", num_hidden_layers=1)
    squares = np.where(np.arange(64) % 8 == 0, 900, 1).astype(np.float32)
    quantized(path, tmp_path / "plain.gguf", "q4_0")
    known = Known(squares, "experts.2.up.weight")
    report = quantized(path, tmp_path / "seen.gguf", "q4_0", calibration=known)
    plain, seen = tensors(tmp_path / "plain.gguf"), tensors(tmp_path / "seen.gguf")
    name = "blk.0.ffn_up_exps.weight"
    same = [np.array_equal(a, b) for a, b in zip(plain[name][1], seen[name][1], strict=True)]
    assert same == [True, True, False, True]
    assert {tensor.note for tensor in report.tensors if tensor.name == name} == {
        "the text says nothing about 3 of its experts"
    }


@pytest.mark.parametrize("tensor", [1, 5, 20])
def test_an_interrupted_run_is_completed(tensor: int, tmp_path: Path) -> None:
    path, whole, out = made("llama"), tmp_path / "whole.gguf", tmp_path / "out.gguf"
    expected = quantized(path, whole, "q4_1")
    interrupted(path, out, after=tensor)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("out")] != ["out.gguf"]
    sizes: list[int] = []
    report = quantized(path, out, "q4_1", on_progress=lambda done, whole: sizes.append(done))
    assert report == expected
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.gguf", "whole.gguf"]


def interrupted(path: Path, out: Path, after: int) -> None:
    """A run that ends when so many tensors are written."""
    calls = 0

    def stop(done: int, whole: int) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantized(path, out, "q4_1", on_progress=stop)


def test_a_journal_that_was_cut_counts_as_far_as_it_goes(tmp_path: Path) -> None:
    path, out = made("llama"), tmp_path / "out.gguf"
    interrupted(path, out, after=6)
    journal = tmp_path / "out.gguf.journal"
    journal.write_bytes(journal.read_bytes()[:-9])
    quantized(path, out, "q4_1")
    quantized(path, tmp_path / "whole.gguf", "q4_1")
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


@pytest.mark.parametrize(
    ("line", "damage"), [(0, b"{broken\n"), (3, b"{broken\n"), (3, b"\xff\n"), (3, b"7\n"), (3, b"{}\n")]
)
def test_a_damaged_journal_is_named(line: int, damage: bytes, tmp_path: Path) -> None:
    path, out, journal = made("llama"), tmp_path / "out.gguf", tmp_path / "out.gguf.journal"
    interrupted(path, out, after=6)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:line], damage, *lines[line + 1 :]]))
    told = r"out\.gguf\.journal is damaged: remove it and out\.gguf\.part, and run again"
    with pytest.raises(ModelError, match=told):
        quantized(path, out, "q4_1")
    journal.unlink()
    (tmp_path / "out.gguf.part").unlink()
    quantized(path, out, "q4_1")


def test_two_processes_do_not_write_the_same_file(tmp_path: Path) -> None:
    path, out = made("llama"), tmp_path / "out.gguf"

    def second(done: int, whole: int) -> None:
        with pytest.raises(ModelError, match=r"out\.gguf\.part is being written by another process: wait until"):
            quantized(path, out, "q4_1")

    quantized(path, out, "q4_1", on_progress=second)
    assert [file.name for file in tmp_path.iterdir()] == ["out.gguf"]


def test_a_run_with_other_options_does_not_go_on(tmp_path: Path) -> None:
    path, out = made("llama"), tmp_path / "out.gguf"
    interrupted(path, out, after=3)
    with pytest.raises(ModelError, match=r"out\.gguf\.part was begun with another model or other options"):
        quantized(path, out, "q5_1")
    with pytest.raises(ModelError, match="was begun with another model or other options"):
        quantized(path, out, "q4_1", text_identity="a text")


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path, out = made("llama"), tmp_path / "out.gguf"
    interrupted(path, out, after=6)
    part = tmp_path / "out.gguf.part"
    content = bytearray(part.read_bytes())
    written = np.flatnonzero(np.frombuffer(content, np.uint8))[-1]
    content[written] ^= 1
    part.write_bytes(content)
    with pytest.raises(ModelError, match=r"tensor .+ reads otherwise than it was written; check the disk"):
        quantized(path, out, "q4_1")
    assert not out.exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("a letter")
    with pytest.raises(ModelError, match=r"out\.gguf exists: give another name, or remove it"):
        quantized(made("llama"), out, "q4_1")
    with pytest.raises(ModelError, match=r"there is no folder .+missing for out\.gguf: make it first"):
        quantized(made("llama"), tmp_path / "missing" / "out.gguf", "q4_1")
    assert out.read_text() == "a letter"


def test_numbers_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = models_zoo.build(models_zoo.CASES["llama"])
    model.state_dict()["model.layers.1.mlp.up_proj.weight"][3, 7] = float("inf")
    path = gguf_files.write(tmp_path / "model.gguf", model)
    with pytest.raises(ModelError, match=r"tensor blk\.1\.ffn_up\.weight: row 3 has numbers that are not finite"):
        quantized(path, tmp_path / "out.gguf", "q8_0")
