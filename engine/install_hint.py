"""How to install what an optional part needs: the packages themselves, as Tidewheel is on no package index."""

from __future__ import annotations

import re
import shlex
import sys


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra of this distribution into this environment."""
    return shlex.join([sys.executable, "-m", "pip", "install", *_requirements(extra)])


def _requirements(extra: str) -> list[str]:
    from importlib import metadata  # takes as long as a fifth of numpy, and most starts need no hint

    try:
        declared = metadata.requires("tidewheel") or []
    except metadata.PackageNotFoundError:
        declared = []
    of_extra = re.compile(rf"\s*;.*\bextra\s*==\s*['\"]{re.escape(extra)}['\"].*")
    return [of_extra.sub("", one) for one in declared if of_extra.search(one)] or [extra]
