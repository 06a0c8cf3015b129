"""The comparison of two servers' answers, which images for other machines have to pass."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EBB, FLOOD = (
    {"template": f'SAY({{"name": "{name}"}})YAS{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}'}
    for name in ("ebb", "flood")
)
SCRIPT = str(Path(__file__).parents[2] / "tools" / "same_answers.py")


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the script for two servers; returns its exit code and what it says."""
    main = runpy.run_path(SCRIPT)["main"]

    def run(*urls: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [SCRIPT, "--wait", "60", *urls])
        return int(main()), capsys.readouterr().out

    return run


# The openai package is imported here: 1 s.
def test_a_server_answers_as_itself(compare: Any, start_server: Any) -> None:
    url = start_server(EBB).url
    code, said = compare(url, url)
    assert code == 0, said
    assert said.count("logprobs within 0.0e+00") == 13


def test_other_tokens_are_found(compare: Any, start_server: Any) -> None:
    code, said = compare(start_server(EBB).url, start_server(FLOOD).url)
    assert code == 1
    assert said.count("the tokens differ") == 10
