"""Write an image's software bill of materials: its Python and Debian packages, as CycloneDX 1.6 in JSON.

Runs while an image is built (Dockerfile.cpu, tools/image/build.sh) and needs what requirements/build.txt names.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
from collections.abc import Iterable, Iterator
from email.parser import HeaderParser
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL


def python_packages(folders: Iterable[Path]) -> Iterator[Component]:
    """Every distribution in these folders. One in an earlier folder hides those of the same name in later ones."""
    seen = set()
    for distribution in importlib.metadata.distributions(path=[str(folder) for folder in folders]):
        metadata = distribution.metadata
        name = re.sub(r"[-_.]+", "-", metadata["Name"]).lower()
        if name in seen:
            continue
        seen.add(name)
        # The older field may contain the whole licence text; only a licence's name is useful here.
        text = metadata["License-Expression"] or metadata["License"] or ""
        licence = LicenseFactory().make_from_string(text) if text and "\n" not in text else None
        purl = PackageURL("pypi", name=name, version=distribution.version)
        yield Component(
            name=name,
            version=distribution.version,
            purl=purl,
            bom_ref=str(purl),
            licenses=[licence] if licence else (),
            description=metadata["Summary"],
        )


def debian_packages(status: Path) -> Iterator[Component]:
    """Every package that dpkg's status file says is installed, on the Debian on which this runs."""
    release = platform.freedesktop_os_release()
    for paragraph in status.read_text(encoding="utf-8").split("\n\n"):
        fields = HeaderParser().parsestr(paragraph)
        if fields["Status"] != "install ok installed":
            continue
        qualifiers = {"arch": fields["Architecture"], "distro": f"{release['ID']}-{release['VERSION_ID']}"}
        purl = PackageURL("deb", release["ID"], fields["Package"], fields["Version"], qualifiers)
        yield Component(name=fields["Package"], version=fields["Version"], purl=purl, bom_ref=str(purl))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="the virtual environment")
    parser.add_argument("--base", type=Path, nargs="*", default=[], help="folders of the base's packages")
    parser.add_argument("--debian", type=Path, required=True, help="dpkg's status file")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    packages = list(python_packages([*arguments.python.glob("lib/python*/site-packages"), *arguments.base]))
    (server,) = [package for package in packages if package.name == "tidewheel"]
    packages.remove(server)
    server.type = ComponentType.APPLICATION
    bom = Bom(components=[*packages, *debian_packages(arguments.debian)])
    bom.metadata.component = server
    JsonV1Dot6(bom).output_to_file(str(arguments.output), allow_overwrite=True, indent=1)


if __name__ == "__main__":
    main()
