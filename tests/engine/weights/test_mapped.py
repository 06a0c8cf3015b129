"""Pages of a mapped file that are not used need not be in memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from tidewheel.engine.machine.memory import resident_bytes
from tidewheel.engine.weights.mapped import leave_mapped


@pytest.mark.skipif(not resident_bytes(), reason="the system does not say what is in memory")
def test_pages_leave_and_come_back(tmp_path: Path) -> None:
    numbers = np.arange(1 << 22, dtype=np.int32)
    (tmp_path / "file").write_bytes(numbers.tobytes())
    with (tmp_path / "file").open("rb") as opened:
        mapped = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.int32)
    part = mapped[1000:].reshape(-1, 8)
    np.testing.assert_array_equal(part.ravel(), numbers[1000:])
    before = resident_bytes()
    leave_mapped(part)
    assert resident_bytes() < before - part.nbytes // 2
    np.testing.assert_array_equal(part.ravel(), numbers[1000:])


def test_what_is_not_mapped_stays() -> None:
    own = np.arange(100_000)
    leave_mapped(own)
    np.testing.assert_array_equal(own, np.arange(100_000))
