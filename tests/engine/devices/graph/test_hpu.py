"""The adapter for Gaudi cards, on a software model of habana_frameworks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine.devices.fakes.hpu import FakeHpu

from tidewheel.engine.devices.graph.hpu import HpuAdapter
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.errors import DeviceError

Install = Callable[[bool], FakeHpu]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Install:
    def make(lazy: bool) -> FakeHpu:
        fake = FakeHpu(lazy=lazy).install(monkeypatch)
        request.addfinalizer(fake.accelerator.leave)
        return fake

    return make


def test_a_machine_without_the_package_is_told_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"habana_frameworks is not installed: use the image of Dockerfile\.hpu"):
        HpuAdapter(GraphOptions())


def test_a_machine_without_a_card_is_told_what_to_do(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(True)
    monkeypatch.setattr(torch.hpu, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="finds no card: see that hl-smi lists one"):
        HpuAdapter(GraphOptions())


@pytest.mark.parametrize(
    ("lazy", "eager", "captures", "compiled"),
    [
        (True, False, True, 2),  # what two launches accumulate
        (True, True, False, 2),
        (False, False, False, 2),  # a function for two shapes
        (False, True, False, 6),  # three operations
    ],
)
def test_the_four_modes(
    install: Install, caplog: pytest.LogCaptureFixture, lazy: bool, eager: bool, captures: bool, compiled: int
) -> None:
    with caplog.at_level("INFO"):
        hpu = install(lazy)
        adapter = HpuAdapter(GraphOptions(enforce_eager=eager))
    assert f"(PT_HPU_LAZY_MODE={int(lazy)})" in caplog.text
    adapter.enter()
    launch = adapter.compile(lambda x, out: out.copy_(x * 2 + 1))
    for size in (3, 4):
        x = torch.tensor([1.0] * size).to(adapter.device)
        out = torch.tensor([0.0] * size).to(adapter.device)
        for _ in range(2):
            adapter.run(lambda x=x, out=out: launch(x, out))
        adapter.synchronize()
        assert out.cpu().tolist() == [3.0] * size
    assert adapter.captures is captures
    assert len(hpu.accelerator.compiled) == compiled


def test_a_captured_launch_is_replayed_behind_the_copies_of_its_inputs(install: Install) -> None:
    hpu = install(True)
    adapter = HpuAdapter(GraphOptions())
    adapter.enter()
    x, out = torch.zeros(3, device=adapter.device), torch.zeros(3, device=adapter.device)
    launch: Callable[[], object] = lambda: out.copy_(x * 2)  # noqa: E731
    adapter.run(launch)
    replay = adapter.capture(launch)
    compiled = len(hpu.accelerator.compiled)
    for value in (4.0, 5.0):
        x.copy_(torch.full((3,), value), non_blocking=True)
        replay()
        assert out.cpu().tolist() == [2 * value] * 3
    assert len(hpu.accelerator.compiled) == compiled


def test_what_waits_to_be_compiled_does_not_change_a_launch(install: Install) -> None:
    hpu = install(True)
    adapter = HpuAdapter(GraphOptions())
    adapter.enter()
    x, out = torch.zeros(3, device=adapter.device), torch.zeros(3, device=adapter.device)
    adapter.run(lambda: out.copy_(x * 2))
    compiled = len(hpu.accelerator.compiled)
    out.fill_(1)
    adapter.run(lambda: out.copy_(x * 2))
    assert len(hpu.accelerator.compiled) == compiled + 1  # the fill, by itself


def test_memory_is_what_the_driver_has(install: Install) -> None:
    install(True)
    adapter = HpuAdapter(GraphOptions())
    adapter.enter()
    before = adapter.memory()
    x = torch.zeros(1000, device=adapter.device)
    assert adapter.memory() == (before.free - 4000, before.total)
    del x
