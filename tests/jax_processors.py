"""JAX on this machine's processors, as four devices."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# Compiled with few optimizations: each test compiles programs that run for milliseconds.
_XLA_FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


@contextmanager
def asked_for() -> Iterator[None]:
    """Within it, the TPU device computes on the processors."""
    _start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield


@functools.cache
def _start() -> None:
    jax = pytest.importorskip("jax")
    jax.config.update("jax_platforms", "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", _XLA_FLAGS)
        assert jax.local_device_count() == 4, "JAX was started before these tests"
