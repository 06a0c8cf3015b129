"""When Ray is taken without `--distributed-executor-backend`: for what this machine alone cannot do."""

from __future__ import annotations

from dataclasses import replace

from tidewheel.engine.devices import stages_take_turns
from tidewheel.engine.options import EngineOptions
from tidewheel.server.options.replicas import ReplicaOptions

from .cluster import is_named

_OF_CORES = ("threads_bind", "reserved_cpus")


def flags_of_cores(engine: EngineOptions) -> list[str]:
    """The given flags that name cores of this machine."""
    return [
        flag
        for group in engine.device_options
        for flag in group.differing_flags([name for name in _OF_CORES if hasattr(group, name)])
    ]


def with_ray(replicas: ReplicaOptions, engine: EngineOptions) -> tuple[ReplicaOptions, str | None]:
    """The options on Ray if that is where they belong, and why, for the log.

    Replicas exist only on Ray. The stages of a pipeline go to the cluster that is named, if any, when they need more
    cores than this machine has. A backend that was asked for stays.
    """
    stages = engine.pipeline.stages
    if replicas.distributed_executor_backend is not None:
        return replicas, None
    if replicas.data_parallel_size > 1:
        why = f"--data-parallel-size {replicas.data_parallel_size}: the replicas run on Ray Serve"
    elif (
        stages > 1
        and is_named()
        and not flags_of_cores(engine)
        and stages_take_turns(engine.device, engine.device_options, stages)
    ):
        why = f"--pipeline-parallel-size {stages} needs more cores than this machine has: the stages go to Ray's nodes"
    else:
        return replicas, None
    return replace(replicas, distributed_executor_backend="ray"), why
