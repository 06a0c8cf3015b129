"""The adapter for NVIDIA GPUs, on a software model of torch.cuda."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from engine.devices.fakes.accelerator import FakeDeviceError
from engine.devices.fakes.cuda import FakeCuda

from tidewheel.engine.devices.graph.cuda import CudaAdapter
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.errors import DeviceError


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda().install(monkeypatch)
    yield fake
    fake.accelerator.leave()


def test_a_machine_without_a_gpu_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match=r"torch finds no GPU; torch .* is built without CUDA: see that nvidia-smi"):
        CudaAdapter(GraphOptions())


def test_a_captured_launch_is_replayed_on_the_same_memory(cuda: FakeCuda) -> None:
    adapter = CudaAdapter(GraphOptions())
    double = adapter.compile(lambda x, out: out.copy_(x * 2))
    x, out = torch.ones(3, device=adapter.device), torch.zeros(3, device=adapter.device)
    adapter.run(lambda: double(x, out))
    replay = adapter.capture(lambda: double(x, out))
    x.fill_(4)
    replay()
    adapter.synchronize()
    assert out.cpu().tolist() == [8.0, 8.0, 8.0]


def test_graphs_share_a_pool_and_are_captured_for_their_thread_alone(cuda: FakeCuda) -> None:
    adapter = CudaAdapter(GraphOptions())
    outs = [torch.zeros(size, device=adapter.device) for size in (100, 50)]
    for out in outs:
        launch = lambda out=out: out.copy_(torch.ones(len(out), device=adapter.device) * 2)  # noqa: E731
        adapter.run(launch)
        adapter.capture(launch)
    assert len(cuda.pools) == 1
    assert cuda.error_modes == {"thread_local"}


def test_a_failed_capture_ends(cuda: FakeCuda) -> None:
    adapter = CudaAdapter(GraphOptions())
    x = torch.ones(3, device=adapter.device)
    with pytest.raises(FakeDeviceError):
        adapter.capture(lambda: x.sum().item())
    adapter.synchronize()


def test_each_thread_sets_the_device(cuda: FakeCuda) -> None:
    adapter = CudaAdapter(GraphOptions())
    x, sums = torch.ones(3, device=adapter.device), []

    def work() -> None:
        adapter.enter()
        sums.append((x + torch.ones(3, device=adapter.device)).sum().item())
        cuda.accelerator.leave()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert sums == [6.0]


def test_memory_is_what_the_driver_has(cuda: FakeCuda) -> None:
    adapter = CudaAdapter(GraphOptions())
    before = adapter.memory()
    x = torch.zeros(1000, device=adapter.device)
    assert adapter.memory() == (before.free - 4000, before.total)
    del x
    assert adapter.memory() == before


def test_eager_compiles_nothing(cuda: FakeCuda) -> None:
    adapter = CudaAdapter(GraphOptions(enforce_eager=True))
    x = torch.ones(3, device=adapter.device)
    adapter.compile(lambda x: x + 1)(x)
    assert not adapter.captures
    assert not cuda.accelerator.compiled
