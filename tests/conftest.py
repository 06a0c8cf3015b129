"""For all tests."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
from collections.abc import Generator, Iterator

import certifi
import hypothesis
import pytest
import trustme

pytest_plugins = ["long_tests"]

# libtpu is installed for its compiler. It must not make each server of the tests look for a TPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# No test fails because the machine is slow, or busy with other things.
hypothesis.settings.register_profile(
    "patient", parent=hypothesis.settings(), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules that the tests import stay, so they need not be searched for garbage later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where no test may take long, imports what many need, so that none of them pays for all."""
    if session.config.getoption("--longest") is not None:
        for name in ("torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


@pytest.fixture(scope="session", autouse=True)
def _few_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clients of HTTP trust one authority, which has signed nothing.

    Each reads all that it trusts when it is made, and certifi's take 40 ms. Tests make hundreds of clients, for plain
    HTTP or with authorities of their own.
    """
    path = tmp_path_factory.mktemp("authorities") / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifi, "where", lambda: str(path))
        yield


@pytest.fixture(autouse=True)
def _level_of_the_log() -> Iterator[None]:
    """Commands that run in this process set it, and other tests count what is logged."""
    logger = logging.getLogger("tidewheel")
    level = logger.level
    yield
    logger.setLevel(level)
