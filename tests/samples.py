"""Which cases of a test `make test` has, and which are for `make sweep`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sample(cases: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """Parameters of a test: `make test` has the cases that `kept` is true of, and `make sweep` has the others."""
    return [case if kept(case) else swept(*(case if isinstance(case, tuple) else (case,))) for case in cases]


def swept(*values: Any) -> Any:
    """A case of a test that `make sweep` alone has."""
    return pytest.param(*values, marks=pytest.mark.sweep)
