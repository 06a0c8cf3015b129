"""Packages that some tests need, and that are not there on every machine."""

from __future__ import annotations

import importlib.util

import pytest


def require_packages(*names: str) -> None:
    """Skip a module's tests if a package is missing. It is not imported, as `pytest.importorskip` would: that can take
    seconds, also where none of the tests run.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
