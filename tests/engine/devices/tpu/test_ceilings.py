"""The ceilings of one chip and of several are measured at once."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

from tidewheel.engine.devices.tpu.ceilings import measure_ceilings
from tidewheel.engine.devices.tpu.mesh import make_mesh
from tidewheel.engine.weights.dtypes import DType


@pytest.mark.parametrize(("dtype", "num_devices"), [("float32", 1), ("bfloat16", 2)])
def test_both_ceilings_are_measured(monkeypatch: pytest.MonkeyPatch, dtype: DType, num_devices: int) -> None:
    monkeypatch.setattr("tidewheel.engine.devices.tpu.ceilings._ON_PROCESSOR", 64)
    ceilings = measure_ceilings(make_mesh(num_devices), dtype, 0.01)
    assert set(ceilings) == {"copy_bytes_per_second", f"{dtype}_flops"}
    assert min(ceilings.values()) > 0
