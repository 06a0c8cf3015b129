"""Prints the packages that an extra of the installed Tidewheel adds, for an environment without Tidewheel.

Usage, where Tidewheel is installed: python tools/extra_requirements.py EXTRA
"""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.requirements import Requirement


def requirements(extra: str) -> list[str]:
    """A line for pip for each package that this machine needs. Raises KeyError if there is no such extra."""
    metadata = importlib.metadata.metadata("tidewheel")
    if extra not in (metadata.get_all("Provides-Extra") or ()):
        raise KeyError(extra)
    found = []
    for line in metadata.get_all("Requires-Dist") or ():
        requirement = Requirement(line)
        marker, requirement.marker = requirement.marker, None
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            found.append(str(requirement))
    return found


if __name__ == "__main__":
    print(*requirements(sys.argv[1]), sep="\n")
