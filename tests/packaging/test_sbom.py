"""The list of what an image is made of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).parents[2]

STATUS = """\
Package: libc6
Status: install ok installed
Architecture: arm64
Version: 2.36-9+deb12u14
Description: GNU C Library
 with a second line

Package: gone
Status: deinstall ok config-files
Architecture: arm64
Version: 1.0
"""

METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
{licence}
Summary: It is {name}
"""


SITE_PACKAGES = Path("lib", "python3.11", "site-packages")


def install(folder: Path, name: str, version: str, licence: str = "License-Expression: Apache-2.0") -> None:
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(METADATA.format(name=name, version=version, licence=licence))


@pytest.fixture
def release() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("ID="):
            return line[3:].strip('"')
    pytest.skip("this system does not say what it is")


def bill_of_materials(tmp_path: Path, *options: str) -> Any:
    """The tool's output for the environment `env` in the folder, checked against CycloneDX's schema."""
    status, output = tmp_path / "status", tmp_path / "sbom.json"
    status.write_text(STATUS)
    command = [sys.executable, str(ROOT / "tools" / "sbom.py"), "--python", str(tmp_path / "env"), *options]
    subprocess.run([*command, "--debian", str(status), "--output", str(output)], check=True)
    document = output.read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(document) is None
    return json.loads(document)


def test_python_and_debian_packages_are_listed(tmp_path: Path, release: str) -> None:
    packages = tmp_path / "env" / SITE_PACKAGES
    install(packages, "tidewheel", "0.1.0")
    install(packages, "prometheus_client", "0.26.0", "License-Expression: Apache-2.0 AND BSD-2-Clause")
    install(packages, "Jinja2", "3.1.6", "License: BSD-3-Clause")
    install(packages, "plain", "1.0", "License: a whole licence\n        of many lines")
    bom = bill_of_materials(tmp_path)
    assert bom["metadata"]["component"]["purl"] == "pkg:pypi/tidewheel@0.1.0"
    components = {component["name"]: component for component in bom["components"]}
    assert set(components) == {"prometheus-client", "jinja2", "plain", "libc6"}
    assert components["prometheus-client"]["licenses"] == [{"expression": "Apache-2.0 AND BSD-2-Clause"}]
    assert components["jinja2"]["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    assert "licenses" not in components["plain"]
    assert components["libc6"]["purl"].startswith(f"pkg:deb/{release}/libc6@2.36-9%2Bdeb12u14?arch=arm64&distro=")


def test_packages_of_the_base_are_listed_unless_the_environment_has_its_own(tmp_path: Path) -> None:
    install(tmp_path / "env" / SITE_PACKAGES, "tidewheel", "0.1.0")
    install(tmp_path / "env" / SITE_PACKAGES, "jinja2", "3.1.6")
    install(tmp_path / "vendor", "torch", "2.11.0")
    install(tmp_path / "vendor", "Jinja2", "3.0.0")
    bom = bill_of_materials(tmp_path, "--base", str(tmp_path / "vendor"), str(tmp_path / "absent"))
    versions = {component["name"]: component["version"] for component in bom["components"]}
    assert versions == {"jinja2": "3.1.6", "torch": "2.11.0", "libc6": "2.36-9+deb12u14"}
