"""A device's ceilings are measured with its own operations, in memory that is free."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from tidewheel.engine.devices.graph.adapter import DeviceMemory  # noqa: E402
from tidewheel.engine.devices.graph.ceilings import measure_ceilings  # noqa: E402
from tidewheel.engine.devices.graph.cpu import CpuAdapter  # noqa: E402
from tidewheel.engine.devices.graph.options import GraphOptions  # noqa: E402
from tidewheel.engine.weights.dtypes import DType  # noqa: E402


class TightAdapter(CpuAdapter):
    """Says that little memory is free, and counts what it is asked for."""

    def __init__(self, free: int) -> None:
        super().__init__(GraphOptions(enforce_eager=True))
        self.free = free
        self.num_runs = self.num_waits = 0

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.free, 2 * self.free)

    def run(self, launch: Callable[[], None]) -> None:
        self.num_runs += 1
        launch()

    def synchronize(self) -> None:
        self.num_waits += 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_ceilings_are_measured(dtype: DType) -> None:
    adapter = TightAdapter(4 * 2**20)
    ceilings = measure_ceilings(adapter, dtype, 0.01)
    assert set(ceilings) == {"copy_bytes_per_second", f"{dtype}_flops"}
    assert min(ceilings.values()) > 0
    # Each is run once before the clock starts and at least once after, and the clock is read when the device is done.
    assert adapter.num_runs >= 4
    assert adapter.num_waits >= 4


def test_no_more_memory_is_taken_than_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2**20
    taken: list[int] = []
    make = torch.ones

    def ones(*args: object, **kwargs: object) -> object:
        tensor = make(*args, **kwargs)
        taken.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "ones", ones)
    measure_ceilings(TightAdapter(free), "float32", 0.0)
    copied, multiplied = taken
    assert 2 * copied <= free // 2
    assert 3 * multiplied <= free // 2
