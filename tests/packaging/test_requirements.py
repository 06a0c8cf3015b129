"""The images install what pyproject.toml asks for, in pinned versions, each with its hashes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
EXTRAS = ("onnx", "otel", "redis", "transformers", "tpu", "cuda")
MACHINES = {"Dockerfile.cpu": "x86_64", "Dockerfile.arm": "aarch64", "Dockerfile.s390x": "s390x"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def environment(machine: str) -> dict[str, str]:
    """Debian 13's Python on a machine, as markers see it."""
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": "3.13.5",
        "python_version": "3.13",
        "sys_platform": "linux",
        "extra": "",
    }


def blocks(name: str) -> list[str]:
    """The requirements of a lock file, each with its hashes."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text().replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins(name: str, machine: str) -> dict[str, str]:
    """The versions by name that a lock file gives to a machine."""
    requirements = [Requirement(block.partition(" --hash=")[0]) for block in blocks(name)]
    found = {}
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate(environment(machine)):
            (specifier,) = requirement.specifier
            assert specifier.operator == "=="
            found[canonicalize_name(requirement.name)] = specifier.version
    return found


def check(wanted: Iterable[str], pinned: dict[str, str], machine: str) -> None:
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate(environment(machine)):
            version = pinned.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement} is not locked: make lock"
            assert requirement.specifier.contains(version), f"{requirement} is locked at {version}: make lock"


@pytest.mark.parametrize("name", ["server", "build", *EXTRAS])
def test_everything_is_pinned_with_hashes(name: str) -> None:
    assert blocks(name)
    for block in blocks(name):
        assert re.fullmatch(r"[\w.-]+==\S+( ;[^;]+?)?( +--hash=sha256:[0-9a-f]{64})+ *", block), block[:80]


@pytest.mark.parametrize("machine", MACHINES.values())
def test_the_locks_are_what_the_project_asks_for(project: dict[str, Any], machine: str) -> None:
    server = pins("server", machine)
    check(project["project"]["dependencies"], server, machine)
    check(project["build-system"]["requires"], pins("build", machine), machine)
    for extra in EXTRAS:
        check(project["project"]["optional-dependencies"][extra], server | pins(extra, machine), machine)


@pytest.mark.parametrize("machine", MACHINES.values())
def test_extras_can_be_combined(machine: str) -> None:
    together: dict[str, str] = {}
    for name in ("server", *EXTRAS):
        for package, version in pins(name, machine).items():
            assert together.setdefault(package, version) == version, package


@pytest.mark.parametrize("machine", MACHINES.values())
@pytest.mark.parametrize("name", ["server", "onnx", "otel", "redis", "transformers"])
def test_images_on_a_vendors_base_keep_its_torch(name: str, machine: str) -> None:
    assert not pins(name, machine).keys() & {"torch", "jax", "jaxlib", "triton"}


@pytest.mark.parametrize("absent", ["llguidance", "pillow", "uvloop", "hf-xet"])
def test_what_has_no_wheels_for_ibm_z_is_not_installed_there(absent: str) -> None:
    assert absent in pins("server", "aarch64")
    assert absent not in pins("server", "s390x")


@pytest.mark.parametrize("dockerfile", MACHINES)
def test_every_machine_has_a_dockerfile(dockerfile: str) -> None:
    assert (ROOT / dockerfile).read_text() == (ROOT / "Dockerfile.cpu").read_text()
