"""JAX on this machine's processors, as four devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# Compiled with few optimizations: each test compiles programs that run for milliseconds.
_XLA_FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


@pytest.fixture(scope="session", autouse=True)
def _jax_on_processors() -> None:
    jax = pytest.importorskip("jax")
    jax.config.update("jax_platforms", "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", _XLA_FLAGS)
        assert jax.local_device_count() == 4, "JAX was started before these tests"


@pytest.fixture(scope="module", autouse=True)
def _asked_for_the_processor() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield
