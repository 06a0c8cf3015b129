"""The core that a model of a test computes on."""

from __future__ import annotations

import os


def one_core() -> str:
    """For `--threads-bind`: each process of tests that run side by side has another core.

    Several threads would wait for each other again and again where other processes have the cores.
    """
    cores, worker = sorted(os.sched_getaffinity(0)), os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return str(cores[int(worker.removeprefix("gw")) % len(cores)])
