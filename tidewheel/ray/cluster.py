"""The Ray cluster that this process is connected to: the one of RAY_ADDRESS, or its own on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tidewheel.engine.errors import TidewheelError

# Without "local", Ray would connect to a cluster that somebody else has started on this machine. In the object store
# lie requests of more than 100 KiB on their way.
_OWN: dict[str, Any] = {"address": "local", "include_dashboard": False, "object_store_memory": 128 * 2**20}


@contextmanager
def connected(environment: Mapping[str, str]) -> Iterator[bool]:
    """A context with a connection to Ray; whether the cluster is this process's own, which then ends with it.

    The `environment` is that of an own cluster, where nothing else is set. Raises TidewheelError.
    """
    is_own = not os.environ.get("RAY_ADDRESS")
    if is_own:
        for name, value in environment.items():
            os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise no_ray(error) from None
    folder = os.getcwd()
    try:
        # Workers import packages from the folder in which Ray was started, before those that are installed.
        os.chdir("/")
        ray.init(log_to_driver=True, logging_level=logging.WARNING, **(_OWN if is_own else {}))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise TidewheelError(f"Ray cannot be used: {error}") from error
    finally:
        os.chdir(folder)
    try:
        yield is_own
    finally:
        ray.shutdown()


def no_ray(error: ImportError) -> TidewheelError:
    """What is missing."""
    return TidewheelError(f"--distributed-executor-backend ray needs Ray Serve: pip install 'tidewheel[ray]' ({error})")


def own_environment() -> dict[str, str]:
    """The variables of options, which processes on other nodes do not have."""
    return {name: value for name, value in os.environ.items() if name.startswith(("TIDEWHEEL_", "VLLM_"))}
