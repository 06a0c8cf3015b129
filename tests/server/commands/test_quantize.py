"""`tidewheel quantize` as its users run it."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import gguf_files
import models_zoo
import pytest
from optional_packages import require_packages

from tidewheel.server.commands.cli import main

pytest.importorskip("tidewheel._native")
pytest.importorskip("torch")
require_packages("transformers")

TEXT = "The dog sleeps, and the quick brown fox jumps over it. Die Füchse sind müde; 犬も寝ている。\n" * 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in float32."""
    case = models_zoo.CASES["llama"]
    return gguf_files.write(tmp_path / "model.gguf", models_zoo.build(case), models_zoo.train_tokenizer())


def test_a_file_is_quantized(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, text = tmp_path / "out.gguf", tmp_path / "text.txt"
    text.write_text(TEXT)
    assert main(["quantize", str(model), str(out), "--type", "q4_0", "--calibrate", str(text), "--context", "40"]) == 0
    printed = capsys.readouterr().out
    assert "  format  tensors" in printed
    assert "    Q4_0       15" in printed
    assert "2 matrices quantized all the same: the text says nothing about its inputs" in printed
    assert f"{out}: " in printed
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors} == {"Q4_0", "Q8_0", "F32"}
    assert main(["inspect", str(out)]) == 0
    assert "Q4_0" in capsys.readouterr().out


def test_a_text_changes_the_result(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    given = ["quantize", str(model)]
    assert main([*given, str(tmp_path / "plain.gguf"), "--type", "q4_0", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*given, str(tmp_path / "seen.gguf"), "--type", "q4_0", "--calibrate", str(text), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [tensor["name"] for tensor in plain["tensors"]] == [tensor["name"] for tensor in seen["tensors"]]
    assert (tmp_path / "plain.gguf").read_bytes() != (tmp_path / "seen.gguf").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{model}", "{out}"], "the following arguments are required: --type"),
        (["{model}", "{out}", "--type", "q9"], "--type: invalid choice: 'q9'"),
        (["{model}", "{model}", "--type", "q4_0"], "model.gguf exists: give another name, or remove it"),
        (["{model}", "{out}", "--type", "q4_0", "--calibrate", "{folder}/none.txt"], "none.txt does not exist"),
        (["{model}", "{out}", "--type", "q4_0", "--calibrate", "{model}"], "--calibrate .*model.gguf is not UTF-8"),
    ],
)
def test_what_cannot_be_done_is_said(
    model: Path, tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(model=model, out=tmp_path / "out.gguf", folder=tmp_path) for argument in arguments]
    try:
        code = main(["quantize", *given])
    except SystemExit as end:
        code = end.code
    assert code not in (0, None)
    assert said.replace(".*", "") in capsys.readouterr().err.replace(str(model.parent) + "/", "")
    assert not (tmp_path / "out.gguf").exists()
