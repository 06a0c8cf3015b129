"""The plans in tidewheel/_native.pyi are those of the native module, and take their fields by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

native: Any = pytest.importorskip("tidewheel._native")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import native_stub  # noqa: E402


def test_the_stub_is_up_to_date() -> None:
    stub = native_stub.STUB.read_text("utf-8")
    assert native_stub.made(stub) == stub, "run: python tools/native_stub.py"


def test_a_stub_without_a_place_for_plans_is_refused() -> None:
    with pytest.raises(ValueError, match="the plans must stand between"):
        native_stub.made('"""Types."""\n')
