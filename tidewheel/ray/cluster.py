"""The Ray cluster that this process is connected to: the one of RAY_ADDRESS, or its own on this machine."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.install_hint import install_command

# Without "local", Ray would connect to a cluster that another user has started on this machine. In the object store
# lie requests of more than 100 KiB on their way.
_OWN: dict[str, Any] = {"address": "local", "include_dashboard": False, "object_store_memory": 128 * 2**20}
_REACHED_S = 10.0


def is_named() -> bool:
    """Whether there is a cluster that `connected` uses: RAY_ADDRESS names it, or this process is connected to it."""
    return bool(os.environ.get("RAY_ADDRESS")) or _is_connected()


def _is_connected() -> bool:
    loaded = sys.modules.get("ray")
    return loaded is not None and loaded.is_initialized()


@contextmanager
def connected(environment: Mapping[str, str]) -> Iterator[bool]:
    """A context with a connection to Ray; whether the cluster is this process's own, which then ends with it.

    A connection that this process has already is used, and left as it is. The `environment` is for an own cluster,
    where nothing else is set. Raises TidewheelError.
    """
    if _is_connected():
        yield False
        return
    is_own = not os.environ.get("RAY_ADDRESS")
    if is_own:
        for name, value in environment.items():
            os.environ.setdefault(name, value)
    with _connection(**(_OWN if is_own else {"address": os.environ["RAY_ADDRESS"]})):
        yield is_own


@contextmanager
def joined(address: str) -> Iterator[None]:
    """A context with a connection to a running cluster: "auto" is RAY_ADDRESS's, or one on this machine.

    Raises TidewheelError, saying how to get one.
    """
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise no_ray(error, "--ray-address needs") from None
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        with _connection(address=address):
            yield
    except _UnusableError as error:
        raise TidewheelError(
            f"{error}. Start a cluster with `ray start --head`, and give its address: --ray-address HOST:6379, or "
            "RAY_ADDRESS (docs/scale-out.md)"
        ) from error


@contextmanager
def _connection(*, address: str, **options: Any) -> Iterator[None]:
    try:
        import ray
    except ImportError as error:
        raise no_ray(error) from None
    folder = os.getcwd()
    _check_reachable(address)
    try:
        # Workers import packages from the folder where Ray was started before installed ones.
        os.chdir("/")
        ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _UnusableError(f"Ray cannot be used: {error}") from error
    finally:
        os.chdir(folder)
    try:
        yield
    finally:
        ray.shutdown()


class _UnusableError(TidewheelError):
    """There is no cluster to connect to."""


def _check_reachable(address: str) -> None:
    """Checks that something listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
    except (OSError, OverflowError) as error:
        raise _UnusableError(f"Ray cannot be used: nobody answers at {address} ({error})") from error


def no_ray(error: ImportError, who_needs: str = "replicas, and stages on nodes of a cluster, need") -> TidewheelError:
    """What is missing."""
    return TidewheelError(f"{who_needs} Ray Serve: {install_command('ray')} ({error})")


def own_environment() -> dict[str, str]:
    """The variables of options, which processes on other nodes do not have."""
    return {name: value for name, value in os.environ.items() if name.startswith(("TIDEWHEEL_", "VLLM_"))}
