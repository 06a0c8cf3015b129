"""The list of what an image is made of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


def install(environment: Path, name: str, version: str, licence: str) -> None:
    folder = environment / "lib" / "python3.11" / "site-packages" / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(METADATA.format(name=name, version=version, licence=licence))


@pytest.fixture
def release() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("ID="):
            return line[3:].strip('"')
    pytest.skip("this system does not say what it is")


def test_python_and_debian_packages_are_listed(tmp_path: Path, release: str) -> None:
    environment, output, status = tmp_path / "env", tmp_path / "sbom.json", tmp_path / "status"
    install(environment, "tidewheel", "0.1.0", "License-Expression: Apache-2.0")
    install(environment, "prometheus_client", "0.26.0", "License-Expression: Apache-2.0 AND BSD-2-Clause")
    install(environment, "Jinja2", "3.1.6", "License: BSD-3-Clause")
    install(environment, "plain", "1.0", "License: a whole licence\n        of many lines")
    status.write_text(STATUS)
    command = [sys.executable, str(ROOT / "tools" / "sbom.py"), "--python", str(environment)]
    subprocess.run([*command, "--debian", str(status), "--output", str(output)], check=True)
    document = output.read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(document) is None
    bom = json.loads(document)
    assert bom["metadata"]["component"]["purl"] == "pkg:pypi/tidewheel@0.1.0"
    components = {component["name"]: component for component in bom["components"]}
    assert set(components) == {"prometheus-client", "jinja2", "plain", "libc6"}
    assert components["prometheus-client"]["licenses"] == [{"expression": "Apache-2.0 AND BSD-2-Clause"}]
    assert components["jinja2"]["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    assert "licenses" not in components["plain"]
    assert components["libc6"]["purl"].startswith(f"pkg:deb/{release}/libc6@2.36-9%2Bdeb12u14?arch=arm64&distro=")
