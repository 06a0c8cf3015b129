"""Tests that take long fail where a limit is given."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import long_tests
import pytest

TESTS = Path(long_tests.__file__).parent
PROGRAM = """
import time

def test_quick():
    pass

def spend(seconds):
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        pass

def test_long():
    spend(0.5)

def test_three_times_as_long():
    spend(1.0)
"""


# pytest starts, and a test takes the time that it may not.
def test_one_that_takes_longer_than_the_limit_is_named_and_three_times_as_long_fails(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "pytest", "-p", "long_tests", "-p", "no:cacheprovider", "--longest", "0.3", "."]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "3 passed, 1 error" in done.stdout
    assert "test_some.py::test_three_times_as_long - Failed: took " in done.stdout
    assert re.search(r"^ +0\.\d s  test_some\.py::test_long$", done.stdout, re.MULTILINE)
    assert "test_long - Failed" not in done.stdout


def test_what_may_take_longer_is_named_by_how_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long_tests.txt"
    path.write_text("# why\n\ntests/a/  all of it\ntests/b.py::test_one  for a reason\n")
    monkeypatch.setattr(long_tests, "ALLOWED", path)
    assert long_tests.allowed() == ("tests/a/", "tests/b.py::test_one")


def test_what_may_take_longer_is_there() -> None:
    for name in long_tests.allowed():
        file, _, function = name.partition("::")
        assert (TESTS.parent / file).exists(), name
        assert function.partition("[")[0] in (TESTS.parent / file).read_text() if function else True, name
