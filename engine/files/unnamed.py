"""Files that are gone when nothing has them open any more."""

from __future__ import annotations

import os
import sys


def unnamed_file() -> int:
    """The descriptor of a new file that has no name, in memory if the system has such files. Raises OSError."""
    if sys.platform == "darwin":
        import tempfile

        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    else:
        return os.memfd_create("tidewheel")
