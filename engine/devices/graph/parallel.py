"""Processes that share a model: one for each accelerator. The first one leads, and the others do as it does.

The leader sends what is asked of its executor to the others over gloo, so that all run the same launches in the same
order. Within the launches they add up what their parts give, through the accelerators' own library.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from ...errors import DeviceError
from ...weights.dtypes import DType
from ...weights.tensor import DenseTensor
from ..batch import StepBatch, StepOutput
from ..bucket_stats import BucketStats
from ..executor import Executor, OnWait, Pending
from ..grouped_weights import GroupedMatrix
from .adapter import Adapter, DeviceMemory
from .ranks import variables_of

_LIBRARIES = {  # by the device's name. Torch calls AMD's library by the name of NVIDIA's
    "cuda": "cpu:gloo,cuda:nccl",
    "rocm": "cpu:gloo,cuda:nccl",
    "hpu": "cpu:gloo,hpu:hccl",
    "neuron": "neuron",  # a group in Python, which torch cannot combine with another library
    "graph-cpu": "gloo",
}
_IDLE = timedelta(days=365)  # there may be no request for a long time
_POLL_S = 0.05
_END_S = 10.0  # for the others to end, or for this process to hear of one that did

logger = logging.getLogger(__name__)


class Group:
    """This process among the `size` that share a model; `rank` 0 leads."""

    def __init__(self, device: str, store: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._device, self._store = device, store
        self._add_up: Callable[[Tensor], Tensor] = _add_up
        self._host: distributed.ProcessGroup | None = None  # for what the hosts tell each other; None: the default

    def join(self) -> None:
        """Return when all others have joined. Raises DeviceError if this process cannot share an accelerator any more.

        Nothing may have used the accelerator before.
        """
        if self._device == "hpu":
            from .hccl import make_adder

            self._add_up = make_adder()
        elif self._device == "neuron":
            from .neuron_group import make_adder

            self._add_up = make_adder()
        Path(self._store).with_name(_ready(self.rank)).touch()
        # All are on this machine, and what they send is unpickled: no one else may connect.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group(
            _LIBRARIES[self._device],
            init_method=f"file://{self._store}",
            rank=self.rank,
            world_size=self.size,
            timeout=_IDLE,
        )
        if self._device == "neuron":
            self._host = distributed.new_group(backend="gloo", timeout=_IDLE)

    def send(self, what: Any) -> None:
        """Give something to all other processes."""
        distributed.broadcast_object_list([what], src=0, group=self._host)

    def receive(self) -> Any:
        """What the leader sent."""
        received: list[Any] = [None]
        distributed.broadcast_object_list(received, src=0, group=self._host)
        return received[0]

    def scatter(self, parts: list[Any] | None = None) -> Any:
        """This process's one of the parts that the leader has."""
        received: list[Any] = [None]
        distributed.scatter_object_list(received, parts, src=0, group=self._host)
        return received[0]

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of all processes' `x`."""
        return self._add_up(x)

    def share_memory(self, adapter: Adapter) -> None:
        """Have the adapter report the least of what all have left, so that all plan alike."""
        own = adapter.memory

        def least() -> DeviceMemory:
            free, total = own()
            sizes = torch.tensor([free, total])
            distributed.all_reduce(sizes, distributed.ReduceOp.MIN, group=self._host)
            return DeviceMemory(*sizes.tolist())

        adapter.memory = least  # type: ignore[method-assign]

    def leave(self) -> None:
        """No more is asked of the others."""
        distributed.destroy_process_group()


class Leader(Group):
    """The first process, which starts the others. Raises DeviceError for a device that cannot share a model."""

    def __init__(self, device: str, size: int) -> None:
        shown = [variables_of(device, rank, size) for rank in range(size)]
        self._folder = Path(tempfile.mkdtemp(prefix="tidewheel-"))
        store = str(self._folder / "store")
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.follower", device, store, str(rank), str(size)],
                env=os.environ | shown[rank],
                stdin=subprocess.PIPE,  # which ends when this process does, and with it the other
            )
            for rank in range(1, size)
        ]
        if device == "neuron":
            os.environ.update(shown[0])  # the runtime of this process would take the cores of all
        self._call = 0  # counts calls, and is odd within one
        super().__init__(device, store, 0, size)
        for process in self._processes:
            threading.Thread(target=self._watch, args=(process,), name="follower", daemon=True).start()

    def join(self) -> None:
        """Return when all others have joined. Raises DeviceError if one of them has ended instead."""
        for rank in range(1, self.size):
            while not (self._folder / _ready(rank)).exists():
                self.check()
                time.sleep(_POLL_S)
        super().join()

    @property
    def followers(self) -> list[int]:
        """The process ids of the others."""
        return [process.pid for process in self._processes]

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Something that all do together. Raises DeviceError if one of them has ended."""
        self.check()
        self._call += 1
        try:
            yield
        except RuntimeError:  # what torch.distributed says of a connection that has ended
            time.sleep(_POLL_S)
            self.check()
            raise
        finally:
            self._call += 1

    def check(self) -> None:
        """Raises DeviceError if one of the others has ended."""
        for rank, process in enumerate(self._processes, 1):
            if (code := process.poll()) is not None:
                raise DeviceError(f"the process of accelerator {rank} has ended with code {code}: see its messages")

    def scattered(
        self, tensors: Iterator[tuple[str, list[DenseTensor | GroupedMatrix]]]
    ) -> Iterator[tuple[str, DenseTensor | GroupedMatrix]]:
        """The first part of each weight; the others get theirs."""
        for name, parts in tensors:
            self.check()
            yield self.scatter([(name, part) for part in parts])
        self.scatter([None] * self.size)

    def stop(self) -> None:
        """End the other processes, whatever they do. Calling it twice is allowed."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._end()

    def part(self) -> None:
        """Wait for the others, which were told to end."""
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._end()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """End this process if it waits for one that has ended: an accelerator's library may do so forever."""
        process.wait()
        call = self._call
        time.sleep(_END_S)
        if call % 2 and self._call == call and process in self._processes:
            logger.critical(
                "The process of another accelerator has ended in the middle of a step, so this process ends too"
            )
            os._exit(1)

    def _end(self) -> None:
        self._processes = []
        if distributed.is_initialized():
            self.leave()
        shutil.rmtree(self._folder, ignore_errors=True)


class LeadingExecutor(Executor):
    """The leader's executor. It passes each call on to the others, which do the same."""

    def __init__(self, executor: Executor, leader: Leader) -> None:
        self.limits = executor.limits
        self._executor, self._leader = executor, leader
        self._is_closed = self._has_failed = False

    @property
    def followers(self) -> list[int]:
        """The process ids of the others."""
        return self._leader.followers

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Warm up in all processes."""
        self._together("warm_up", None, lambda: self._executor.warm_up(progress))

    def start(self, batch: StepBatch) -> Pending:
        """Begin the step in all processes."""
        sampling = batch.sampling
        # Masks are for the sampler of the leader, whose tokens are taken.
        told = batch if sampling.masks is None else replace(batch, sampling=replace(sampling, masks=None))
        pending: Pending = self._together("start", told, lambda: self._executor.start(batch))

        def wait() -> StepOutput:
            output: StepOutput = self._together("wait", None, pending.wait)
            return output

        return OnWait(wait)

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """Copy KV blocks of a cache group in all processes, `pairs[i] = (from, to)`, shape [N, 2]."""
        self._together("copy_blocks", (pairs, group), lambda: self._executor.copy_blocks(pairs, group))

    def stats(self) -> BucketStats | None:
        """As the executor does."""
        return self._executor.stats()

    def measure_ceilings(self, dtype: DType, seconds: float) -> dict[str, float]:
        """As the executor does."""
        return self._executor.measure_ceilings(dtype, seconds)

    def close(self) -> None:
        """Close all processes' executors, and end the processes."""
        if self._is_closed:
            return
        self._is_closed = True
        self._executor.close()
        if self._has_failed:
            self._leader.stop()
            return
        try:
            self._leader.check()
            self._leader.send(("close", None))
        except (DeviceError, RuntimeError):
            self._leader.stop()
        else:
            self._leader.part()

    def _together(self, call: str, argument: Any, own: Callable[[], Any]) -> Any:
        if self._is_closed:
            raise DeviceError("this executor was closed")
        try:
            with self._leader.calling():
                self._leader.send((call, argument))
                return own()
        except BaseException:
            self._has_failed = True
            raise


def _add_up(x: Tensor) -> Tensor:
    distributed.all_reduce(x)
    return x


def _ready(rank: int) -> str:
    return f"ready-{rank}"
