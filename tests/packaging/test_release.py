"""A release has wheels for the documented processors and Pythons, and an image for each Dockerfile."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return found


def built_pythons(project: dict[str, Any]) -> list[str]:
    """The versions, such as 3.10, that cibuildwheel builds or tests a wheel for."""
    selectors = project["tool"]["cibuildwheel"]["build"]
    return [re.sub(r"^cp3(\d+)-\*$", r"3.\1", selector) for selector in selectors]


def test_github_takes_the_workflow(tmp_path: Path) -> None:
    wrong = tmp_path / "release.yml"
    wrong.write_text(WORKFLOW.read_text().replace("runs-on:", "run-on:", 1))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, WORKFLOW, wrong], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert str(wrong) in done.stdout
    assert str(WORKFLOW) not in done.stdout


def test_every_architecture_has_a_job_and_a_row_in_the_documentation(
    project: dict[str, Any], jobs: dict[str, Any]
) -> None:
    architectures = project["tool"]["cibuildwheel"]["linux"]["archs"]
    assert jobs["wheels"]["strategy"]["matrix"]["arch"] == architectures
    page = (ROOT / "docs" / "development.md").read_text().partition("\n## Releases\n")[2]
    assert re.findall(r"^\| .* \| `manylinux_2_28_(\w+)` \|", page, re.MULTILINE) == architectures


def test_every_supported_python_gets_a_wheel(project: dict[str, Any]) -> None:
    names = [name.rpartition(" ")[2] for name in project["project"]["classifiers"] if ":: 3." in name]
    assert built_pythons(project) == names
    assert list(SpecifierSet(project["project"]["requires-python"]).filter(names)) == names
    assert f"Python {names[0]} to {names[-1]}." in (ROOT / "docs" / "install.md").read_text()


def test_as_many_wheels_are_awaited_as_are_built(project: dict[str, Any], jobs: dict[str, Any]) -> None:
    stable = project["tool"]["scikit-build"]["wheel"]["py-api"].replace("cp3", "3.")
    own = [version for version in built_pythons(project) if int(version[2:]) <= int(stable[2:])]
    (awaited,) = re.findall(r"wc -l\)\" = (\d+)", " ".join(step.get("run", "") for step in jobs["check"]["steps"]))
    assert int(awaited) == len(own) * len(project["tool"]["cibuildwheel"]["linux"]["archs"])


def test_every_dockerfile_has_an_image(jobs: dict[str, Any]) -> None:
    rows = jobs["images"]["strategy"]["matrix"]["include"]
    assert sorted(row["image"] for row in rows) == sorted(path.suffix[1:] for path in ROOT.glob("Dockerfile.*"))


def test_only_a_tag_publishes_and_only_one_job_may_upload_packages(jobs: dict[str, Any]) -> None:
    trusted = [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert trusted == ["publish"]
    for name in ("publish", "image-for-cpus"):
        assert jobs[name]["if"] == "github.ref_type == 'tag'"
    (push,) = [step["with"]["push"] for step in jobs["images"]["steps"] if "push" in step.get("with", {})]
    assert push == "${{ github.ref_type == 'tag' }}"
    assert {"test", "check"} <= set(jobs["publish"]["needs"])
    assert "test" in jobs["images"]["needs"]
