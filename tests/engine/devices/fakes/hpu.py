"""habana_frameworks.torch as Intel's documentation describes it, for one card of a process.

https://docs.habana.ai/en/latest/PyTorch/Inference_on_PyTorch/Inference_Using_HPU_Graphs.html: static shapes, all on the
card, no flow that depends on data, no in-place updates of views. In lazy mode operations accumulate until `mark_step`,
and what accumulated is compiled if it is new; in eager mode each operation is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from engine.devices.fakes.accelerator import GIB, Accelerator, DeviceTensor, FakeDeviceError
from engine.devices.fakes.recording import Recording
from torch import Tensor

_all_reduce_on_host = torch.distributed.all_reduce


class FakeHpu:
    """What replaces habana_frameworks and torch.hpu. `fallbacks` is how often an operation ran on the CPU."""

    def __init__(self, total_bytes: int = GIB, *, lazy: bool) -> None:
        self.accelerator = Accelerator("hpu", total_bytes, compiles_operations=not lazy, capture_refuses_parts=True)
        self.graphs: list[FakeHpuGraph] = []
        self.fallbacks = 0
        self._lazy = lazy

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeHpu:
        """Make `import habana_frameworks.torch` find this."""
        fake, accelerator = self, self.accelerator

        class HPUGraph(FakeHpuGraph):
            def __init__(self) -> None:
                super().__init__(fake)

        def compile_function(function: Any, *, backend: str, fullgraph: bool, dynamic: bool) -> Any:
            assert (backend, fullgraph, dynamic) == ("hpu_backend", True, False)
            assert not self._lazy, "hpu_backend needs PT_HPU_LAZY_MODE=0"
            return accelerator.compiled_function(function)

        def module(name: str, **members: Any) -> ModuleType:
            made = ModuleType(name)
            vars(made).update(members)
            monkeypatch.setitem(sys.modules, name, made)
            return made

        metrics = module("habana_frameworks.torch.hpu.metrics", metric_localcontext=self._metric)
        hpu = module(
            "habana_frameworks.torch.hpu",
            HPUGraph=HPUGraph,
            Stream=object,
            stream=nullcontext,
            set_device=lambda device: accelerator.enter(),
            synchronize=self._synchronize,
            mem_get_info=lambda device=None: accelerator.memory,
            is_available=lambda: True,
            metrics=metrics,
        )
        core = module("habana_frameworks.torch.core", mark_step=accelerator.flush)
        distributed = module("habana_frameworks.torch.distributed", __path__=[str(Path(__file__).with_name("hccl"))])
        package = module("habana_frameworks.torch", hpu=hpu, core=core, distributed=distributed)
        monkeypatch.delitem(sys.modules, "habana_frameworks.torch.distributed.hccl", raising=False)
        monkeypatch.setattr(torch.distributed, "all_reduce", self._all_reduce)
        module("habana_frameworks", torch=package)
        monkeypatch.setattr(torch, "hpu", hpu, raising=False)
        monkeypatch.setattr(torch, "compile", compile_function)
        monkeypatch.setenv("PT_HPU_LAZY_MODE", str(int(self._lazy)))
        if self._lazy:
            accelerator.be_lazy()
        return self

    def _all_reduce(self, x: Tensor, *args: Any) -> None:
        if not isinstance(x, DeviceTensor):
            _all_reduce_on_host(x, *args)
            return
        collectives = os.environ.get("PT_HPU_ENABLE_LAZY_COLLECTIVES", "false")
        if self.accelerator.recording is not None and collectives != "true":
            raise FakeDeviceError("HPU graphs on several cards need PT_HPU_ENABLE_LAZY_COLLECTIVES=true")
        torch.ops.fake_hccl.all_reduce(x)

    def _synchronize(self) -> None:
        self.accelerator.flush()
        self.accelerator.synchronized += 1

    @contextmanager
    def _metric(self, name: str) -> Iterator[Metric]:
        metric = Metric(self, name)
        yield metric
        metric.stop()


class Metric:
    """How often something happened within a context: `stats()[0]` is the name and the number of it."""

    def __init__(self, hpu: FakeHpu, name: str) -> None:
        assert name in ("graph_compilation", "cpu_fallback")
        self._hpu, self._name = hpu, name
        self._start = self._now()
        self._stop: int | None = None

    def stop(self) -> None:
        """The context was left."""
        self._stop = self._now()

    def stats(self) -> list[tuple[str, int]]:
        """What was counted."""
        return [("TotalNumber", (self._now() if self._stop is None else self._stop) - self._start)]

    def _now(self) -> int:
        return len(self._hpu.accelerator.compiled) if self._name == "graph_compilation" else self._hpu.fallbacks


class FakeHpuGraph:
    """A graph, which keeps its memory for itself."""

    def __init__(self, hpu: FakeHpu) -> None:
        self._hpu, self._accelerator = hpu, hpu.accelerator
        self.recording = Recording(hpu.accelerator)
        hpu.graphs.append(self)

    def capture_begin(self) -> None:
        """Record what follows."""
        assert self._hpu._lazy, "HPU graphs need PT_HPU_LAZY_MODE=1"
        self._accelerator.begin_capture(self.recording)

    def capture_end(self) -> None:
        """The graph is complete."""
        self._accelerator.take(self._accelerator.end_capture())
        self._accelerator.compile(self)

    def replay(self) -> None:
        """Do it again, behind what has accumulated."""
        self._accelerator.flush()
        self.recording.replay()
