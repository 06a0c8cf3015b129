"""The command line of this very installation, for processes that it starts."""

from __future__ import annotations

import sys
from pathlib import Path

import tidewheel


def own_command(*arguments: str) -> list[str]:
    """`tidewheel` with these arguments.

    It is the file and not `-m tidewheel`, which would take a package of that name from the current folder.
    """
    return [sys.executable, str(Path(tidewheel.__file__).with_name("__main__.py")), *arguments]
