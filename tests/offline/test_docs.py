"""The examples of docs/python.md run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import encoder_zoo as zoo
import lora_files
from server.conftest import TIDEWHEEL

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


# A process loads three models.
def test_the_python_examples(tmp_path: Path) -> None:
    adapter = lora_files.write(tmp_path / "adapter", lora_files.tensors(hidden=256, kv=128, layers=6))
    setting = f"EMBEDDING_MODEL, ADAPTER = {str(zoo.folder('bert'))!r}, {str(adapter)!r}\n"
    script = tmp_path / "examples.py"
    script.write_text(setting + "\n".join(blocks("python")))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "The tide turns ->" in done.stdout
    assert "\npoems -> " in done.stdout
    assert "swap_space has no effect" in done.stderr
    assert "\r" not in done.stderr  # no bar without a terminal


# A process loads the model.
def test_the_batch_example(tmp_path: Path) -> None:
    [requests] = blocks("json")
    (tmp_path / "requests.jsonl").write_text(requests)
    [command] = blocks("sh")
    arguments = command.split()
    assert arguments[0] == ".venv/bin/tidewheel"
    done = subprocess.run([*TIDEWHEEL, *arguments[1:]], capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {answer["custom_id"] for answer in answers} == {"a", "b"}
