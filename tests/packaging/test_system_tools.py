"""Programs that only the system can bring: what lacks them is skipped, and said so at the end; .ci/run lacks none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import system_tools

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "system_tools.py"
DOCTEST = "Skipped: the C++ tests need doctest (apt-get install doctest-dev)"
PARTS = ("missing-tools", "lint-and-native-test", "python-test")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script on a system that has nothing but Python."""
    bare = {"PATH": "/nonexistent", "CXX": "false", **environment}
    return subprocess.run([sys.executable, "-S", str(SCRIPT), *arguments], capture_output=True, text=True, env=bare)


def make(venv: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", "-C", str(ROOT), f"VENV={venv}", f"PYTHON={sys.executable}", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**kept, **environment})


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A folder where everything seems to be installed."""
    for name in (".tools", ".test-tools", ".installed", ".node-clients"):
        (tmp_path / name).touch()
    return tmp_path


def test_a_bare_system_is_told_what_each_kind_of_tests_lacks() -> None:
    told = run("missing", "test").stdout.splitlines()
    assert told[0] == DOCTEST
    assert "Skipped: the tests of the web page need chromium (apt-get install chromium)" in told
    assert not any("linux-gnu" in line for line in told)
    packages = run("packages", "test", "cross-test").stdout.split()
    assert {"doctest-dev", "chromium", "npm", "g++-s390x-linux-gnu", "qemu-user-static"} < set(packages)
    assert len(packages) == len(set(packages))


def test_the_documentation_names_every_package() -> None:
    page = (ROOT / "docs" / "development.md").read_text()
    section = page.partition("\n## Programs that tests need\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*`) \| .* \|$", section, re.MULTILINE)
    named = {package for row in rows for package in re.findall("`([^`]+)`", row)}
    tools = system_tools.TOOLS.values()
    assert named == {tool.package for tool in tools if tool.target in ("test", "cross-test")}


def test_cpp_tests_without_their_framework_are_skipped_before_anything_is_built(venv: Path) -> None:
    done = make(venv, "native-test", CXX="false")
    assert (done.returncode, done.stdout) == (0, f"{DOCTEST}\n"), done.stderr
    assert (venv / "skipped" / "native-test").read_text() == f"{DOCTEST}\n"
    assert not (venv / "native").exists()


def test_make_test_ends_with_all_that_its_parts_have_left_out(venv: Path) -> None:
    (venv / "skipped").mkdir()
    for part, lines in {"lint": "c\n", "python-test": "b\na\nb\n", "cross-test-s390x": "of another target\n"}.items():
        (venv / "skipped" / part).write_text(lines)
    done = make(venv, "test", *(f"--assume-old={part}" for part in PARTS))
    assert done.stdout.splitlines()[-3:] == ["a", "b", "c"], done.stderr
    plan = make(venv, "--dry-run", "test").stdout.splitlines()
    assert "system_tools.py missing test" in plan[0]
    assert "system_tools.py report" in plan[-1]


def test_a_test_that_lacks_its_tool_is_skipped_and_leaves_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = system_tools.Tool("abacus", "abacus-utils", "the tests that count", lambda: None)
    monkeypatch.setitem(system_tools.TOOLS, "abacus", lacking)
    monkeypatch.setenv("TIDEWHEEL_SKIPPED", str(tmp_path / "skipped" / "python-test"))
    with pytest.raises(pytest.skip.Exception, match="the tests that count need abacus"):
        system_tools.require("abacus")
    line = "Skipped: the tests that count need abacus (apt-get install abacus-utils)\n"
    assert (tmp_path / "skipped" / "python-test").read_text() == line


def test_a_tool_that_is_there_is_found() -> None:
    assert run("need", "unshare", PATH=os.environ["PATH"]).returncode == (system_tools.TOOLS["unshare"].find() is None)
