"""The adapter for Trainium, on a software model of torch-neuronx."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine.devices.fakes.accelerator import FakeDeviceError
from engine.devices.fakes.neuron import FakeNeuron

from tidewheel.engine.devices.graph.neuron import NeuronAdapter
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.errors import DeviceError


@pytest.fixture
def neuron(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNeuron]:
    fake = FakeNeuron().install(monkeypatch)
    yield fake
    fake.accelerator.leave()


def test_a_machine_without_the_package_is_told_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"torch_neuronx is not installed: use the image of Dockerfile\.neuron"):
        NeuronAdapter(GraphOptions())


def test_a_machine_without_a_device_is_told_what_to_do(neuron: FakeNeuron, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(DeviceError, match="finds no device: see that neuron-ls lists one"):
        NeuronAdapter(GraphOptions())


def test_a_function_is_compiled_once_a_shape(neuron: FakeNeuron) -> None:
    adapter = NeuronAdapter(GraphOptions())
    adapter.enter()
    double = adapter.compile(lambda x: x * 2 + 1)
    for size in (2, 3, 2, 3):
        x = torch.tensor([1.0] * size).to(adapter.device)
        adapter.run(lambda x=x: double(x))
    assert len(neuron.accelerator.compiled) == 2


def test_a_function_that_depends_on_data_is_refused(neuron: FakeNeuron) -> None:
    adapter = NeuronAdapter(GraphOptions())
    adapter.enter()
    x = torch.zeros(3, device=adapter.device)
    with pytest.raises(FakeDeviceError, match="in a compiled function"):
        adapter.compile(lambda x: x.sum().item())(x)


def test_memory_is_read_when_the_device_is_done(neuron: FakeNeuron) -> None:
    adapter = NeuronAdapter(GraphOptions())
    adapter.enter()
    x = torch.zeros(1000, device=adapter.device)
    before = neuron.accelerator.synchronized
    assert adapter.memory() == (neuron.accelerator.total_bytes - 4000, neuron.accelerator.total_bytes)
    assert neuron.accelerator.synchronized > before
    del x
