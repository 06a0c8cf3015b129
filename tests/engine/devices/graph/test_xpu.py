"""The adapter for Intel GPUs, on a software model of torch.xpu."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from engine.devices.fakes.accelerator import GIB, FakeDeviceError
from engine.devices.fakes.xpu import FakeXpu

from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.devices.graph.xpu import XpuAdapter
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.machine.memory import Memory

Install = Callable[[FakeXpu], XpuAdapter]


@pytest.fixture
def adapter_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    fakes: list[FakeXpu] = []

    def make(fake: FakeXpu) -> XpuAdapter:
        fakes.append(fake.install(monkeypatch))
        return XpuAdapter(GraphOptions())

    yield make
    for fake in fakes:
        fake.accelerator.leave()


def test_a_machine_without_a_gpu_is_told_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"no GPU; torch .* is built without support for Intel GPUs: see that clinfo"):
        XpuAdapter(GraphOptions())


def test_a_captured_launch_is_replayed_on_the_same_memory(adapter_on: Install) -> None:
    adapter = adapter_on(FakeXpu())
    double = adapter.compile(lambda x, out: out.copy_(x * 2))
    x, out = torch.ones(3, device=adapter.device), torch.zeros(3, device=adapter.device)
    adapter.run(lambda: double(x, out))
    replay = adapter.capture(lambda: double(x, out))
    x.fill_(4)
    replay()
    adapter.mark()()
    assert out.cpu().tolist() == [8.0, 8.0, 8.0]


def test_a_torch_without_graphs_compiles_and_says_so(adapter_on: Install, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeXpu(has_graphs=False)
    with caplog.at_level(logging.INFO):
        adapter = adapter_on(fake)
    assert "Steps are compiled and not captured" in caplog.text
    adapter.compile(lambda x: x + 1)(torch.ones(3, device=adapter.device))
    assert (adapter.captures, adapter.any_width, len(fake.accelerator.compiled)) == (False, True, 1)


@pytest.mark.parametrize("has_fp64", [True, False])
def test_only_a_gpu_with_float64_sums_in_it(adapter_on: Install, has_fp64: bool) -> None:
    adapter = adapter_on(FakeXpu(has_fp64=has_fp64))
    assert adapter.has_float64 == has_fp64
    x = torch.ones(2, dtype=torch.float64).to(adapter.device)
    with contextlib.nullcontext() if has_fp64 else pytest.raises(FakeDeviceError, match="aspect fp64"):
        x.sum()


def test_memory_is_what_the_driver_has(adapter_on: Install) -> None:
    adapter = adapter_on(FakeXpu())
    before = adapter.memory()
    x = torch.zeros(1000, device=adapter.device)
    assert adapter.memory() == (before.free - 4000, before.total)
    del x


def test_an_integrated_gpu_has_what_it_and_the_machine_have_left(
    adapter_on: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        adapter = adapter_on(FakeXpu(integrated=True))
    assert "does not tell" in caplog.text
    x = torch.zeros(1000, device=adapter.device)
    for available, free in ((None, GIB - 4000), (2 * GIB, GIB - 4000), (GIB // 2, GIB // 2)):
        machine = Memory(4 * GIB, available, None, None)
        monkeypatch.setattr("tidewheel.engine.devices.graph.xpu.read_memory", lambda machine=machine: machine)
        assert adapter.memory() == (free, GIB)
    del x
