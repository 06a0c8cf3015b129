"""`--pipeline-parallel-size N --distributed-executor-backend ray`, also of an LLM: stages on the nodes of a cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tidewheel.engine.declaring.option import listed
from tidewheel.engine.devices.parallel_options import ParallelOptions
from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.options import EngineOptions
from tidewheel.server.options.replicas import ReplicaOptions

from .cluster import connected, own_environment
from .room import check_room, cluster_cpus, cpus_of_stages
from .taking import flags_of_cores

if TYPE_CHECKING:
    from .stages import RayHost

logger = logging.getLogger(__name__)

_OF_OWN_CLUSTER = {"RAY_USAGE_STATS_ENABLED": "0"}


@contextmanager
def stage_host(engine: EngineOptions, replicas: ReplicaOptions) -> Iterator[RayHost]:
    """The host of the stages, in the cluster that `connected` finds. Raises TidewheelError."""
    _check_cores(engine)
    with connected(_OF_OWN_CLUSTER) as is_own:
        from .stages import RayHost

        count, nodes = engine.pipeline.stages, cluster_cpus()
        cpus = replicas.cpus_per_replica or cpus_of_stages(count, nodes)
        _check_groups(engine, cpus)
        if is_own:  # other clusters may grow
            check_room("stages", count, cpus, nodes, "--pipeline-parallel-size")
        logger.info("Placing %d stages of %d cores", count, cpus)
        folder = os.getcwd() if is_own else None
        with RayHost(count, cpus, environment=own_environment(), folder=folder) as host:
            yield host


def _check_cores(engine: EngineOptions) -> None:
    if flags := flags_of_cores(engine):
        raise TidewheelError(
            f"{listed(flags)} and stages on Ray do not work together: the node chooses the cores of a stage; say how "
            "many it has with --cpus-per-replica"
        )


def _check_groups(engine: EngineOptions, cpus: int) -> None:
    """Raise TidewheelError if a stage of `cpus` cores cannot have the groups that the options ask for."""
    for group in engine.device_options:
        if isinstance(group, ParallelOptions) and group.tensor_parallel_size > cpus:
            raise TidewheelError(
                f"--tensor-parallel-size {group.tensor_parallel_size} needs as many cores in each stage, which has "
                f"{cpus}: raise --cpus-per-replica, or lower --tensor-parallel-size"
            )
