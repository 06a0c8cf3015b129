"""The adapter for AMD GPUs, on the software model of torch.cuda: torch has both under the same names."""

from __future__ import annotations

import pytest
import torch
from engine.devices.fakes.cuda import FakeCuda

from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.devices.graph.ranks import variables_of
from tidewheel.engine.devices.graph.rocm import RocmAdapter
from tidewheel.engine.errors import DeviceError


@pytest.mark.parametrize(("version", "built"), [(None, "; torch .* is built without ROCm"), ("7.15.26333", "")])
def test_a_machine_without_a_gpu_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, version: str | None, built: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", version)
    with pytest.raises(DeviceError, match=f"torch finds no GPU{built}: see that amd-smi lists one"):
        RocmAdapter(GraphOptions())


def test_a_captured_launch_is_replayed_on_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda().install(monkeypatch)
    try:
        adapter = RocmAdapter(GraphOptions())
        x, out = torch.ones(3, device=adapter.device), torch.zeros(3, device=adapter.device)
        adapter.run(lambda: out.copy_(x * 2))
        replay = adapter.capture(lambda: out.copy_(x * 2))
        x.fill_(4)
        replay()
        assert out.cpu().tolist() == [8.0, 8.0, 8.0]
    finally:
        fake.accelerator.leave()


def test_each_process_sees_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert variables_of("rocm", 1, 2) == {"HIP_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert variables_of("rocm", 1, 2) == {"CUDA_VISIBLE_DEVICES": "5"}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,3")
    assert variables_of("rocm", 0, 2) == {"HIP_VISIBLE_DEVICES": "2"}
    with pytest.raises(DeviceError, match="HIP_VISIBLE_DEVICES=2,3 names 2 accelerators, fewer than"):
        variables_of("rocm", 0, 3)
