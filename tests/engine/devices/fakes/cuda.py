"""torch.cuda as its documentation describes it, for one device: memory, streams, and graphs in pools.

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engine.devices.fakes.accelerator import GIB, Accelerator, FakeDeviceError
from engine.devices.fakes.recording import Recording

if TYPE_CHECKING:
    from typing_extensions import Self


class FakeCuda:
    """What replaces torch.cuda. `pools` are the bytes of each graph pool: graphs of one share its memory."""

    def __init__(self, total_bytes: int = GIB) -> None:
        self.accelerator = Accelerator("cuda", total_bytes)
        self.pools: dict[object, int] = {}
        self.graphs: list[FakeCudaGraph] = []
        self.error_modes: set[str] = set()
        self._streams = threading.local()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Put this in the place of torch.cuda."""
        self.put_into(monkeypatch, torch.cuda, CUDAGraph=lambda: FakeCudaGraph(self))
        return self

    def put_into(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, **more: Any) -> None:
        """Replace what a module of torch has for a vendor's GPUs, and torch.compile."""
        accelerator = self.accelerator

        def set_device(device: object) -> None:
            accelerator.enter()

        def compile_function(function: Any, *, fullgraph: bool, dynamic: bool) -> Any:
            assert (fullgraph, dynamic) == (True, False)
            return accelerator.compiled_function(function)

        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "set_device": set_device,
            "synchronize": self._synchronize,
            "mem_get_info": lambda device=None: accelerator.memory,
            "graph_pool_handle": object,
            "Stream": FakeStream,
            "Event": lambda: FakeEvent(self),
            "stream": self._stream,
            "current_stream": lambda device=None: self._current(),
            "empty_cache": lambda: None,
            **more,
        }.items():
            monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(torch, "compile", compile_function)

    def _synchronize(self, device: object = None) -> None:
        if self.accelerator.recording is not None:
            raise FakeDeviceError("operation not permitted when stream is capturing")
        self.accelerator.synchronized += 1

    def _current(self) -> FakeStream:
        if not hasattr(self._streams, "current"):
            self._streams.current = FakeStream(is_default=True)
        stream: FakeStream = self._streams.current
        return stream

    @contextmanager
    def _stream(self, stream: FakeStream) -> Iterator[None]:
        before = self._current()
        self._streams.current = stream
        try:
            yield
        finally:
            self._streams.current = before

    def begin(self, recording: Recording, error_mode: str) -> None:
        """Begin a capture on the current stream."""
        if self._current().is_default:
            raise FakeDeviceError("CUDA graphs must be captured on a non-default stream")
        self.error_modes.add(error_mode)
        self.accelerator.begin_capture(recording)


class FakeStream:
    """A stream; all of them do what they are asked at once."""

    def __init__(self, device: object = None, *, is_default: bool = False) -> None:
        self.is_default = is_default

    def wait_stream(self, stream: FakeStream) -> None:
        """Nothing is left to wait for."""


class FakeEvent:
    """A place in a stream. It can be waited for once it was recorded, and not during a capture."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._is_recorded = False

    def record(self) -> None:
        """Put it behind all that the stream was asked for."""
        self._is_recorded = True

    def synchronize(self) -> None:
        """Wait for what is before it."""
        assert self._is_recorded
        self._cuda._synchronize()


class FakeCudaGraph:
    """A graph. Graphs of one pool share the memory of the largest, since only one of them runs at a time."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self._accelerator = cuda, cuda.accelerator
        self._pool: object = None
        self.recording = Recording(cuda.accelerator)
        cuda.graphs.append(self)

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """Record what follows."""
        self._pool = pool or object()
        self._cuda.begin(self.recording, capture_error_mode)

    def capture_end(self) -> None:
        """The graph is complete."""
        num_bytes = self._accelerator.end_capture()
        self._accelerator.compile(self)
        before = self._cuda.pools.get(self._pool, 0)
        self._cuda.pools[self._pool] = max(before, num_bytes)
        self._accelerator.take(self._cuda.pools[self._pool] - before)

    def replay(self) -> None:
        """Do it again."""
        self.recording.replay()
