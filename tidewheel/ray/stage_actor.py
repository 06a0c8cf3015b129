"""StageActor: a stage of a pipeline in an actor of Ray, on cores of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import ray
from msgspec import Struct

from tidewheel import _native
from tidewheel.engine.errors import DeviceError, TidewheelError
from tidewheel.engine.loading.stages.layers import groups_of_stage, load_stage
from tidewheel.engine.machine.memory import Memory, read_memory
from tidewheel.engine.pipeline.runner import StageRunner
from tidewheel.engine.pipeline.speed import StageCores, StageSpeed, cores_at, measure
from tidewheel.engine.pipeline.stage_plan import StagePlan
from tidewheel.engine.pipeline.tcp_link import RESULTS, STEPS, TcpLink, accept, connect
from tidewheel.engine.weights.lora import LoraAdapter

from .cores import claim_cores, usable_cpus

_CONNECT_S = 60.0  # for the processes before and behind a stage to do their part


class StagePlace(Struct, frozen=True):
    """Where a stage is, and what there is. `isa` are the kernels that its processor computes with."""

    node: str
    pid: int
    cores: StageCores
    isa: str
    memory: Memory


class LoadedWeights(Struct, frozen=True):
    """A stage's groups of processors, and what it takes in memory, in bytes."""

    groups: Sequence[Sequence[int]]
    weight_bytes: int
    cache_bytes: int


class StageError(Exception):
    """Why a stage cannot do what it was told, in a text for people. Other errors come with Ray's stack."""


class StageActor:
    """Claims `num_cpus` cores, loads a stage, and runs the steps that come to it until they stop coming.

    Its methods are called in the order in which they stand here. Only `load_adapter` and `finished` may be answered by
    other threads while it runs.
    """

    def __init__(self, num_cpus: int, environment: Mapping[str, str], folder: str | None, shared: int | None) -> None:
        """Relative paths begin at `folder`. The cores are the stage's own. With `shared`, the stage's number, they are
        taken from all that this process may use.
        """
        os.environ.update(environment)
        if folder is not None:
            os.chdir(folder)
        self._num_cpus, self._shared = num_cpus, shared
        self._runner: StageRunner | None = None

    def place(self) -> StagePlace:
        """Where it is. Raises StageError if it has no cores."""
        try:
            self._cpus = self._claim()
            isa = _native.chosen_isa_level("auto")
        except (TidewheelError, ValueError) as error:
            raise StageError(str(error)) from None
        node = ray.util.get_node_ip_address()
        return StagePlace(node, os.getpid(), cores_at(node, self._cpus), isa, read_memory())

    def measure(self, ceiling: str) -> StageSpeed:
        """How fast its cores are: see `measure`."""
        return measure("auto", self._cpus, ceiling)

    def _claim(self) -> Sequence[int]:
        if self._shared is None:
            self._claimed = claim_cores(self._num_cpus)  # until this process ends
            self._claimed.bind()
            return self._claimed.cpus
        cpus, first = usable_cpus(), self._shared * self._num_cpus
        return sorted({cpus[(first + i) % len(cpus)] for i in range(self._num_cpus)})

    def load(self, plan: StagePlan) -> LoadedWeights:
        """Load the weights. Raises StageError."""
        self._plan = plan
        try:
            groups = groups_of_stage(plan, self._cpus)
            self._loaded = load_stage(plan, groups, lambda fraction: None)
        except TidewheelError as error:
            raise StageError(str(error)) from None
        return LoadedWeights(groups, self._loaded.weight_bytes, self._loaded.cache_bytes)

    def load_adapter(self, number: int, part: LoraAdapter) -> str:
        """Load the stage's part of an adapter, also while it runs. What is wrong with it; "" for nothing."""
        try:
            self._loaded.executor.load_lora(number, part)
        except DeviceError as error:
            return str(error)
        return ""

    def listen(self, token: bytes) -> tuple[str, int]:
        """Wait for connections of those who have the token, at this address."""
        self._token = token
        self._listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        host, port = self._listener.getsockname()[:2]
        return host, port

    def run(self, following: tuple[str, int] | None) -> None:
        """Connect to the following stage, and run steps until no more can come. The last stage has none."""
        plan, token = self._plan, self._token
        slots = [plan.shape.slot() for _ in range(plan.shape.num_stages)]
        links = []
        try:
            if following is not None:
                links.append(TcpLink(connect(following, token, STEPS), slots))
            purposes = {STEPS} if following is not None else {STEPS, RESULTS}
            with self._listener as listener:
                accepted = accept(listener, token, purposes, _CONNECT_S)
            upstream = TcpLink(accepted[STEPS], slots)
            links.append(upstream)
            if following is None:
                links.append(TcpLink(accepted[RESULTS], slots))
            downstream = links[0] if following is not None else links[-1]
            masks = None if following is not None else downstream
            self._runner = StageRunner(plan, self._loaded, slots, upstream, downstream, masks)
            self._runner.run()
        finally:
            for link in links:
                link.close()
            self._loaded.executor.close()
            for slot in slots:
                slot.close()

    def finished(self) -> int:
        """The number of the last step that it has computed, 0 at first."""
        return 0 if self._runner is None else self._runner.finished
