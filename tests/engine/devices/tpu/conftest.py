"""All of these tests have JAX on this machine's processors."""

from __future__ import annotations

from collections.abc import Iterator

import jax_processors
import pytest


@pytest.fixture(scope="module", autouse=True)
def _jax_on_processors() -> Iterator[None]:
    with jax_processors.asked_for():
        yield
