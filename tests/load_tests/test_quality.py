"""Formats of weights are compared by quality: the model, its files, and what llama.cpp gives, which is a stub here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import gguf
import gguf_files
import numpy as np
import pytest
import quality

pytest.importorskip("tidewheel._native")

# It makes the same file of every type, and finds all tokens equally likely.
STUB = """#!{python}
import json, shutil, struct, sys

if "make_gguf" in sys.argv[1]:
    shutil.copy(sys.argv[2], sys.argv[3])
elif "{broken}" == "yes":
    sys.exit("out of memory")
else:
    for window in json.load(sys.stdin):
        sys.stdout.buffer.write(bytes(4 * len(window) * {vocab_size}))
"""
TEXT = "The dog sleeps, and the quick brown fox jumps over it.\n" * 4


@pytest.fixture
def model(tmp_path: Path) -> Path:
    quantize = gguf_files.quantized(gguf.GGMLQuantizationType.Q8_0)
    return gguf_files.zoo_file(tmp_path / "model.gguf", "qwen2", quantize)


def vocab_size(model: Path) -> int:
    embedding = next(tensor for tensor in gguf.GGUFReader(model).tensors if tensor.name == "token_embd.weight")
    return int(embedding.shape[1])


def compare(tmp_path: Path, model: Path, *arguments: str, broken: str = "no") -> int:
    python = tmp_path / "llama/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB.format(python=sys.executable, vocab_size=vocab_size(model), broken=broken))
    python.chmod(0o755)
    (tmp_path / "text.txt").write_text(TEXT)
    texts = ["--text", str(tmp_path / "text.txt"), "--context", "32", "--rounds", "0"]
    return quality.main([str(model), "--llama-cpp-python", str(tmp_path / "llama"), *texts, *arguments])


def test_programs_are_compared_on_each_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "quality.json"
    assert compare(tmp_path, model, "--types", "Q8_0", "--quantizations", "int8", "--json", str(target)) == 0
    ours, theirs, quantized = json.loads(target.read_text())["formats"]
    assert [of["program"] for of in (ours, theirs, quantized)] == ["tidewheel", "llama-cpp-python", "tidewheel"]
    assert theirs["perplexity"] == pytest.approx(vocab_size(model))
    assert 0 < ours["from_file"] < 1e-3 < theirs["from_file"]
    assert ours["from_model"] == pytest.approx(ours["from_file"]), "the stub's file is the model itself"
    assert quantized["from_file"] is None
    assert quantized["model_perplexity"] == ours["model_perplexity"]
    table = capsys.readouterr().out
    assert "tidewheel Q8_0" in table
    assert "llama-cpp-python Q8_0" in table


def test_what_is_calibrated_is_compared_too(model: Path, tmp_path: Path) -> None:
    target, other = tmp_path / "quality.json", tmp_path / "other.txt"
    other.write_text("A cat looks at them from the wall, and yawns.\n" * 4)
    calibrate = ["--calibrate", str(other), "--calibrated", "Q4_0", "--methods", "int8"]
    nothing = ["--types", "", "--quantizations", ""]
    assert compare(tmp_path, model, *nothing, *calibrate, "--json", str(target), "--keep", str(tmp_path)) == 0
    formats = json.loads(target.read_text())["formats"]
    assert [(of["program"], of["weights"]) for of in formats] == [
        ("tidewheel", "Q4_0 calibrated"),
        ("llama-cpp-python", "Q4_0 calibrated"),
        ("tidewheel", "Q4_0 imatrix"),
        ("llama-cpp-python", "Q4_0 imatrix"),
        ("tidewheel", "int8 folder"),
    ]
    written, _, theirs, _, folder = formats
    assert theirs["from_model"] < 1e-3 < written["from_model"], "the stub's file is the model itself"
    assert 0 < folder["from_model"] < written["from_model"]
    importances = np.load(tmp_path / "importances.npz")
    assert importances["blk.0.attn_q.weight"].shape == (64,)
    assert "token_embd.weight" not in importances


def test_a_peer_that_fails_is_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path, model, "--types", "Q8_0", "--quantizations", "", broken="yes") == 1
    error = capsys.readouterr().err
    assert "llama-cpp-python gave too few logits" in error
    assert "out of memory" in error


def test_the_plot_has_a_point_for_each_format_with_a_speed() -> None:
    known = quality.Quality("tidewheel", "a<b", 4.5, 20.0, 19.0, 0.01, 0.1, 0.9, None, prefill=100.0, decode=50.0)
    slower = quality.Quality("llama-cpp-python", "Q4_0", 4.5, 20.0, 19.0, 0.1, 0.1, 0.9, None, 80.0, 25.0)
    unknown = quality.Quality("tidewheel", "int8", 8.5, 20.0, 19.0, 0.01, 0.1, 0.9, None)
    tree = ElementTree.fromstring(quality.plot([known, slower, unknown]))
    circles = [element.attrib for element in tree.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(circles) == 2
    assert float(circles[0]["cx"]) > float(circles[1]["cx"]), "faster is further right"
    assert float(circles[0]["cy"]) > float(circles[1]["cy"]), "less divergence is further down"
    assert "a<b" in {element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")}
