"""The software models of accelerators are as strict as they say: a test that passes on them proves something."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from engine.devices.fakes.accelerator import Accelerator, FakeDeviceError
from engine.devices.fakes.cuda import FakeCuda
from engine.devices.fakes.hpu import FakeHpu
from engine.devices.fakes.neuron import FakeNeuron
from engine.devices.fakes.recording import Recording
from torch import Tensor

Launch = Callable[[], object]


@pytest.fixture
def card() -> Iterator[Accelerator]:
    accelerator = Accelerator("hpu", 1 << 20, capture_refuses_parts=True)
    accelerator.enter()
    yield accelerator
    accelerator.leave()


def graph_of(card: Accelerator, launch: Launch) -> Recording:
    launch()
    recording = Recording(card)
    card.begin_capture(recording)
    try:
        launch()
    finally:
        card.end_capture()
    return recording


def test_a_graph_runs_again_on_the_same_memory(card: Accelerator) -> None:
    x, out = torch.tensor([1.0, 2.0], device="hpu"), torch.zeros(2, device=card.device)
    graph = graph_of(card, lambda: out.copy_(x * 2 + torch.arange(2, device="hpu")))
    x.copy_(torch.tensor([5.0, 6.0]))
    graph.replay()
    assert out.cpu().tolist() == [10.0, 13.0]


def test_a_capture_computes_nothing(card: Accelerator) -> None:
    counter = torch.zeros(1, device="hpu")
    graph = graph_of(card, lambda: counter.add_(1))
    assert counter.item() == 1
    graph.replay()
    assert counter.item() == 2


def test_a_graph_whose_memory_was_freed_is_refused(card: Accelerator) -> None:
    kept, out = [torch.ones(2, device="hpu")], torch.zeros(2, device="hpu")
    graph = graph_of(card, lambda: out.copy_(kept[0] + 1))
    kept.clear()
    with pytest.raises(FakeDeviceError, match="freed"):
        graph.replay()


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (lambda x: x.sum().item(), "depends on data"),
        (lambda x: bool(x.sum() > 1), "depends on data"),
        (lambda x: torch.nonzero(x), "depends on data"),
        (lambda x: torch.masked_select(x, x > 1), "depends on data"),
        (lambda x: x[x > 1], "depends on data"),
        (lambda x: x.index_put_((x > 1,), torch.zeros((), device="hpu")), "depends on data"),
        (lambda x: x.cpu(), "copies between the host"),
        (lambda x: x.to("cpu"), "copies between the host"),
        (lambda x: torch.zeros(4).copy_(x), "copies between the host"),
        (lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0], device="hpu") + x, "copies between the host"),
        (lambda x: x * torch.tensor(2.0), "operand on the CPU"),
        (lambda x: x[:2].add_(1), "writes to a view"),
        (lambda x: x.view(2, 2).index_fill_(0, torch.zeros(1, dtype=torch.long, device="hpu"), 7.0), "writes to"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(
    card: Accelerator, launch: Callable[[Tensor], object], reason: str
) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], device="hpu")
    with pytest.raises(FakeDeviceError, match=reason):
        graph_of(card, lambda: launch(x))


def test_other_shapes_than_were_run_before_are_refused(card: Accelerator) -> None:
    sizes = iter([2, 3])
    with pytest.raises(FakeDeviceError, match="was not run"):
        graph_of(card, lambda: torch.zeros(next(sizes), device="hpu"))


def test_operands_on_two_devices_are_refused(card: Accelerator) -> None:
    with pytest.raises(FakeDeviceError, match="on the CPU"):
        torch.ones(2, device="hpu") + torch.ones(2)


def test_a_thread_that_has_not_set_the_device_is_refused(card: Accelerator) -> None:
    failures: list[Exception] = []

    def other() -> None:
        try:
            torch.ones(2, device="hpu") + torch.ones(2, device="hpu")
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert failures


def test_memory_is_charged_and_given_back(card: Accelerator) -> None:
    before = card.memory[0]
    x = torch.zeros(1000, device="hpu")
    half = x[:500]
    assert card.memory[0] == before - 4000
    del x
    assert card.memory[0] == before - 4000
    del half
    assert card.memory[0] == before
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 20, device="hpu")
    assert card.memory[0] == before


def test_lazy_operations_are_compiled_together_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hpu = FakeHpu(lazy=True).install(monkeypatch)
    import habana_frameworks.torch as htorch
    from habana_frameworks.torch.hpu.metrics import metric_localcontext

    htorch.hpu.set_device("hpu")
    x = torch.ones(4, device="hpu")
    try:
        for n, compiled in ((4, 1), (4, 1), (3, 2), (3, 2), (4, 2)):
            with metric_localcontext("graph_compilation") as metric:
                before = len(hpu.accelerator.compiled)
                (x[:n] * 2 + 1).sum()
                htorch.core.mark_step()
            assert len(hpu.accelerator.compiled) == compiled
            assert metric.stats()[0][1] == compiled - before
    finally:
        hpu.accelerator.leave()


def test_eager_operations_are_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hpu = FakeHpu(lazy=False).install(monkeypatch)
    torch.hpu.set_device("hpu")
    try:
        x = torch.ones(4, device="hpu")
        (x * 2 + 1) * 2
        assert len(hpu.accelerator.compiled) == 2
        double = torch.compile(lambda x: (x * 2 + 1) * 2, backend="hpu_backend", fullgraph=True, dynamic=False)
        double(x)
        double(x)
        assert len(hpu.accelerator.compiled) == 3
        with pytest.raises(FakeDeviceError, match="in a compiled function"):
            torch.compile(lambda x: x.sum().item(), backend="hpu_backend", fullgraph=True, dynamic=False)(x)
    finally:
        hpu.accelerator.leave()


def test_neuron_refuses_what_its_compiler_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    neuron = FakeNeuron().install(monkeypatch)
    torch.accelerator.set_device_index(0)
    try:
        x = torch.ones(2, 20000, device=neuron.accelerator.device)
        for operation, reason in (
            (lambda: x.sort(descending=True, stable=True), "sorts do not compile"),
            (lambda: x.topk(20), "such a top-k"),
            (lambda: x.double() + x.double(), "float64"),
            (lambda: torch.empty(2, pin_memory=True), "no pinned memory"),
        ):
            with pytest.raises(FakeDeviceError, match=reason):
                operation()
        x[:, :64].topk(8)
    finally:
        neuron.accelerator.leave()


def test_graphs_of_one_pool_share_the_memory_of_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda().install(monkeypatch)
    torch.cuda.set_device(0)
    try:
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        x = torch.ones(1000, device="cuda")

        def capture(n: int) -> int:
            (x[:n] * 2).sum()
            before, graph = torch.cuda.mem_get_info()[0], torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=pool)
                (x[:n] * 2).sum()
                graph.capture_end()
            return before - torch.cuda.mem_get_info()[0]

        assert [capture(1000), capture(500), capture(1000)] == [4004, 0, 0]
        with pytest.raises(FakeDeviceError, match="non-default stream"):
            torch.cuda.CUDAGraph().capture_begin()
    finally:
        cuda.accelerator.leave()
