"""RayHost: the stages of a pipeline as actors in a Ray cluster, and RayStages while they run.

Ray places the stages and says when one has ended. Steps go from process to process over TCP: see TcpLink.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidewheel.engine.cancellation import Cancellation
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.machine.memory import Memory
from tidewheel.engine.pipeline.links import Link
from tidewheel.engine.pipeline.speed import StageCores, StageSpeed
from tidewheel.engine.pipeline.stage_plan import StagePlan
from tidewheel.engine.pipeline.stages import Launch, loaded_text, stage_name
from tidewheel.engine.pipeline.step_slot import Arrays, StepSlot
from tidewheel.engine.pipeline.tcp_link import RESULTS, STEPS, TOKEN_BYTES, TcpLink, connect
from tidewheel.engine.weights.lora import LoraAdapter

from .room import cluster_cpus
from .stage_actor import LoadedWeights, StageActor, StageError, StagePlace

logger = logging.getLogger(__name__)

_PLACED_S = 60.0  # for the cluster to find room
_LOOK_S = 0.2  # between two looks at whether a start was cancelled
_ANSWER_S = 2.0  # for a stage to say how far it is
_CALLS = 3  # of an actor at a time: it runs steps, loads an adapter, and says how far it is
_DEATH_S = 10.0  # until Ray knows why a connection was closed


class RayHost:
    """Has the stages of a pipeline in the cluster that Ray is connected to, one a node where there are several.

    See StageHost. A context manager, which ends stages that were not launched.
    """

    is_here: bool = False

    def __init__(
        self,
        count: int,
        num_cpus: int,
        *,
        environment: Mapping[str, str],
        folder: str | None = None,
        bind_cores: bool = True,
    ) -> None:
        """Place `count` stages, each with `num_cpus` cores, which it has to itself unless `bind_cores` is off.

        Their processes have the variables of `environment`, and relative paths begin at `folder` there. Raises
        DeviceError if the cluster has no room.
        """
        self._place = partial(_Placement, count, num_cpus, environment, folder, bind_cores)
        self._placement: _Placement | None = self._place(Cancellation())
        self._places = self._placement.places

    def __enter__(self) -> RayHost:
        return self

    def __exit__(self, *_: object) -> None:
        if self._placement is not None:
            self._placement.close()

    def cores(self) -> Sequence[StageCores]:
        """See StageHost."""
        return [place.cores for place in self._places]

    def measure(self, stages: Sequence[int], ceiling: str) -> Sequence[StageSpeed]:
        """See StageHost."""
        placement, found = self._placement, dict[int, StageSpeed]()
        assert placement is not None
        while left := [stage for stage in stages if stage not in found]:
            # One of each node at a time, so that no two read the same memory.
            turn = list({self._places[stage].node: stage for stage in reversed(left)}.values())
            references = {stage: placement.actors[stage].measure.remote(ceiling) for stage in turn}
            found |= placement.call(Cancellation(), references)
        return [found[stage] for stage in stages]

    def rooms(self) -> Sequence[int | None]:
        """See StageHost. Stages of one node have as much of its memory as each other."""
        return rooms_of_all(self._places)

    def memory(self, weights: Sequence[int]) -> Memory:
        """See StageHost."""
        return memory_of_all(self._places, weights)

    def launch(self, plans: Sequence[StagePlan], weight_bytes: int) -> Launch:
        """See StageHost. The first launch is where the stages were placed; later ones place them again.

        Each stage then has a node that it was on, where that still has room: its layers were chosen for it.
        """

        def start(cancellation: Cancellation) -> RayStages:
            placement, self._placement = self._placement, None
            if placement is None:
                placement = self._place(cancellation)
                placement.keep_nodes([place.node for place in self._places])
            return RayStages(placement, plans, cancellation)

        return start


class _Placement:
    """Actors that have cores, and where they are."""

    def __init__(
        self,
        count: int,
        num_cpus: int,
        environment: Mapping[str, str],
        folder: str | None,
        bind_cores: bool,
        cancellation: Cancellation,
    ) -> None:
        self.places: Sequence[StagePlace] = ()
        self.actors: list[Any] = []
        self._names = [f"pipeline stage {index + 1} of {count}" for index in range(count)]
        self._group: PlacementGroup = placement_group([{"CPU": num_cpus}] * count, strategy="SPREAD")
        try:
            self._await_room(count, num_cpus, cancellation)
            for index in range(count):
                strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
                actor = ray.remote(StageActor).options(
                    num_cpus=num_cpus, scheduling_strategy=strategy, max_restarts=0, max_concurrency=_CALLS
                )
                shared = None if bind_cores else index
                self.actors.append(actor.remote(num_cpus, dict(environment), folder, shared))
            self.places = self.call_all(cancellation, [actor.place.remote() for actor in self.actors])
            self._check_kernels()
        except BaseException:
            self.close()
            raise

    def name(self, index: int) -> str:
        """A stage in words, with its node once that is known."""
        return self._names[index] + (f" on node {self.places[index].node}" if self.places else "")

    def call(self, cancellation: Cancellation, references: Mapping[int, Any]) -> dict[int, Any]:
        """The stages' results, by number. Raises DeviceError for the first that failed, and LoadCancelledError."""
        results: dict[int, Any] = {}
        while waiting := {reference: index for index, reference in references.items() if index not in results}:
            for reference in ray.wait([*waiting], timeout=_LOOK_S)[0]:
                index = waiting[reference]
                try:
                    results[index] = ray.get(reference)
                except (RayError, StageError) as error:
                    raise DeviceError(f"{self.name(index)}{_said(error)}") from None
            cancellation.check()
        return results

    def call_all(self, cancellation: Cancellation, references: Sequence[Any]) -> list[Any]:
        """The same of all stages, in order."""
        results = self.call(cancellation, dict(enumerate(references)))
        return [results[index] for index in range(len(references))]

    def keep_nodes(self, nodes: Sequence[str]) -> None:
        """Let each stage be on its node of these, as far as there are places on it."""
        order = kept_order([place.node for place in self.places], nodes)
        self.places, self.actors = [self.places[i] for i in order], [self.actors[i] for i in order]

    def close(self) -> None:
        """End the actors, and let others have their room. Calling it twice is allowed."""
        actors, self.actors = self.actors, []
        for actor in actors:
            ray.kill(actor, no_restart=True)
        remove_placement_group(self._group)

    def _await_room(self, count: int, num_cpus: int, cancellation: Cancellation) -> None:
        deadline = time.monotonic() + _PLACED_S
        while not self._group.wait(1):
            cancellation.check()
            if time.monotonic() >= deadline:
                raise DeviceError(
                    f"the cluster has no room for {count} stages of {num_cpus} cores: its nodes have "
                    f"{', '.join(f'{cpus:g}' for cpus in cluster_cpus()) or 'no'} cores, some of which may be taken; "
                    "lower --cpus-per-replica or --pipeline-parallel-size, or add nodes"
                )

    def _check_kernels(self) -> None:
        """Check that all nodes use the same kernels: bits must not depend on where the stages are."""
        levels = {place.isa: place.node for place in self.places}
        if len(levels) > 1:
            found = ", ".join(f"{isa} on {node}" for isa, node in levels.items())
            raise DeviceError(
                f"the nodes compute with different kernels ({found}), and so would give other bits when stages are "
                "placed otherwise: set TIDEWHEEL_ISA to the lowest of them, or use nodes that are alike"
            )


class RayStages:
    """See Stages."""

    share_clock: bool = False

    def __init__(self, placement: _Placement, plans: Sequence[StagePlan], cancellation: Cancellation) -> None:
        """Load the weights where the stages were placed, and connect them. See Launch."""
        self._placement, self._plans = placement, plans
        self._runs: list[Any] = []
        self._stopped = threading.Event()
        self._watch: threading.Thread | None = None
        self.has_ended = False
        self.slots: Sequence[StepSlot] = [plan.shape.slot() for plan in plans]
        links: list[TcpLink] = []
        try:
            actors, token = placement.actors, secrets.token_bytes(TOKEN_BYTES)
            loaded: list[LoadedWeights] = placement.call_all(
                cancellation, [actor.load.remote(plan) for actor, plan in zip(actors, plans, strict=True)]
            )
            addresses = placement.call_all(cancellation, [actor.listen.remote(token) for actor in actors])
            following = [*addresses[1:], None]
            self._runs = [actor.run.remote(address) for actor, address in zip(actors, following, strict=True)]
            for address, purpose in ((addresses[0], STEPS), (addresses[-1], RESULTS)):
                try:
                    links.append(TcpLink(connect(address, token, purpose), self.slots))
                except OSError as error:
                    at = ":".join(map(str, address))
                    raise DeviceError(f"{at}, where a pipeline stage listens, cannot be reached: {error}") from error
        except BaseException:
            for link in links:
                link.close()
            self._free()
            raise
        self.first: Link = links[0]
        self.last: Link = links[1]
        self.masks: Link = links[1]
        for index, weights in enumerate(loaded):
            logger.info("%s", loaded_text(self, index, weights.groups, weights.weight_bytes, weights.cache_bytes))

    def name(self, index: int) -> str:
        """See Stages."""
        return stage_name(index, len(self._plans), self._plans[index].stage)

    def place(self, index: int) -> str:
        """See Stages."""
        place = self._placement.places[index]
        return f"process {place.pid} on node {place.node}"

    def where(self, number: int, arrays: Arrays) -> int:
        """See Stages. A stage that does not answer has not ended it."""
        asked = [actor.finished.remote() for actor in self._placement.actors]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)
        for index, reference in enumerate(asked):
            try:
                if reference not in answered or ray.get(reference) < number:
                    return index
            except RayError:
                return index
        return len(asked) - 1

    def watch(self, on_end: Callable[[], None]) -> None:
        """See Stages."""

        def run() -> None:
            while not self._stopped.is_set():
                if ray.wait(self._runs, timeout=_LOOK_S)[0] and not self._stopped.is_set():
                    self.has_ended = True
                    on_end()
                    return

        self._watch = threading.Thread(target=run, name="stages", daemon=True)
        self._watch.start()

    def load_adapter(self, number: int, parts: Sequence[LoraAdapter]) -> None:
        """See Stages."""
        actors = list(self._placement.actors)  # none any more where they were closed
        loading = [actor.load_adapter.remote(number, part) for actor, part in zip(actors, parts, strict=False)]
        try:
            said = ray.get(loading)
        except RayTaskError as error:
            raise DeviceError(f"a stage cannot load the adapter: {error.cause}") from error
        except RayError:
            raise DeviceError(self.failure()) from None
        if wrong := [text for text in said if text]:
            raise DeviceError(wrong[0])

    def failure(self) -> str:
        """See Stages. Of several that have ended, those that did not end by themselves are named."""
        deadline = time.monotonic() + _DEATH_S
        while True:
            ended = ray.wait(self._runs, num_returns=len(self._runs), timeout=_LOOK_S)[0]
            for index, reference in enumerate(self._runs):
                if reference in ended and (error := _error_of(reference)) is not None:
                    return f"{self.name(index)}, {self.place(index)}{_said(error)}"
            if time.monotonic() >= deadline or len(ended) == len(self._runs):
                names = ", ".join(self.place(i) for i in range(len(self._runs)))
                return f"a connection between the stages of the pipeline has ended ({names})"

    def close(self) -> None:
        """See Stages."""
        self._stopped.set()
        if self._watch is not None and self._watch is not threading.current_thread():
            self._watch.join()
        for link in (self.first, self.last):
            link.close()
        self._free()

    def _free(self) -> None:
        self._placement.close()
        for slot in self.slots:
            slot.close()


def memory_of_all(places: Sequence[StagePlace], weights: Sequence[int]) -> Memory:
    """What nodes have for stages at these places, with the bytes of each stage's `weights`: see StageHost."""
    found: dict[str, tuple[Memory, float]] = {}
    for place, num_bytes in zip(places, weights, strict=True):
        share = found[place.node][1] if place.node in found else 0.0
        found[place.node] = place.memory, share + num_bytes / max(sum(weights), 1)
    ceilings = [memory.ceiling / share for memory, share in found.values() if memory.ceiling is not None and share]
    available = [memory.available / share for memory, share in found.values() if memory.available is not None and share]
    return Memory(
        total=int(min(ceilings)) if ceilings else None,
        available=int(min(available)) if available else None,
        cgroup_limit=None,
        cgroup_used=None,
    )


def rooms_of_all(places: Sequence[StagePlace]) -> list[int | None]:
    """The memory that a stage at each of these places may take: see StageHost."""
    beside = Counter(place.node for place in places)
    return [None if (room := place.memory.available) is None else room // beside[place.node] for place in places]


def kept_order(found: Sequence[str], nodes: Sequence[str]) -> list[int]:
    """The place that each stage takes, so that it is on its node of `nodes`. The places are on the nodes `found`.

    A stage whose node has no place left takes one that no other stage wants.
    """
    left, order = list(range(len(found))), dict[int, int]()
    for stage, node in enumerate(nodes):
        if (place := next((index for index in left if found[index] == node), None)) is not None:
            order[stage] = place
            left.remove(place)
    order |= zip([stage for stage in range(len(nodes)) if stage not in order], left, strict=True)
    return [order[stage] for stage in range(len(nodes))]


def _error_of(reference: Any) -> Exception | None:
    try:
        ray.get(reference)
    except (RayError, StageError) as error:
        return error
    return None


def _said(error: Exception) -> str:
    """What goes behind the name of a stage."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        text = str(cause) if isinstance(cause, StageError) else f"{type(cause).__name__}: {cause}"
        return f": {text}"
    if "node has died" in str(error) or "node died" in str(error).lower():
        return " has ended, because its node has gone"
    return " has ended; the system kills a process when memory runs out"
