"""An installation has all that the sources say, and nothing else."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tidewheel

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tidewheel"
INSTALLED = Path(tidewheel.__file__).parent

installed_only = pytest.mark.skipif(INSTALLED == SOURCES, reason="runs from the sources: nothing is installed")


@pytest.fixture
def distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("tidewheel")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from the sources: nothing is installed")


def files_of(package: Path) -> dict[Path, bytes]:
    folders = [package, *(link.resolve() for link in package.iterdir() if link.is_symlink())]
    return {
        path.relative_to(package if folder == package else folder.parent): path.read_bytes()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }


@installed_only
def test_the_tests_see_the_sources_as_they_are_now() -> None:
    sources, installed = files_of(SOURCES), files_of(INSTALLED)
    assert sorted(installed) == sorted(sources)
    assert [path for path in sources if sources[path] != installed[path]] == []


@installed_only
def test_the_native_module_and_the_type_marker_are_there() -> None:
    assert list(INSTALLED.glob("_native*.so"))
    assert (INSTALLED / "py.typed").exists()


# A process loads the model.
def test_python_that_is_started_in_the_repository_computes_too() -> None:
    """It finds the sources first, which have no native module."""
    program = "import tidewheel; tidewheel.LLM(kv_cache_space=0.05).shutdown(); print(tidewheel.__file__)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"{SOURCES / '__init__.py'}\n"), ran.stderr


def test_the_metadata_names_version_licence_and_command(distribution: importlib.metadata.Distribution) -> None:
    assert distribution.version == tidewheel.__version__
    assert distribution.metadata["License-Expression"] == "Apache-2.0"
    (command,) = distribution.entry_points.select(group="console_scripts")
    assert (command.name, command.value) == ("tidewheel", "tidewheel.server.commands.cli:main")


def test_large_packages_come_only_with_an_extra(distribution: importlib.metadata.Distribution) -> None:
    always = [line for line in distribution.requires or () if "extra ==" not in line]
    needed = {re.split(r"[^\w-]", line, maxsplit=1)[0] for line in always}
    assert "tokenizers" in needed
    assert not needed & {"torch", "transformers", "onnxruntime", "pytest"}
