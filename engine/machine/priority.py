"""The priority of threads, by which work in the background gives way to streams."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger(__name__)

_NICE = 10  # gets about a tenth of a core that a stream also wants, or a whole core that is free


def lower_thread_priority() -> None:
    """Give the calling thread, and threads that it starts, a lower priority than those that answer, if possible."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        try:
            os.nice(_NICE)
        except OSError as error:  # a sandbox may forbid it
            logger.warning("Work in the background keeps its priority and may slow answers: %s", error)
