"""Several processes: replicas on Ray Serve, how many and with how many cores each, or the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from tidewheel.engine.declaring.option import Options, option
from tidewheel.engine.declaring.record import record
from tidewheel.engine.declaring.values import at_least, count


@record(frozen=True, kw_only=True)
class ReplicaOptions(Options):
    """Without a backend there is one server, in this process."""

    distributed_executor_backend: str | None = option(
        None,
        "ray starts the server as replicas on Ray Serve, or with --pipeline-parallel-size its stages on the nodes, "
        "in the cluster of RAY_ADDRESS or a new one on this machine; needs the extra ray. mp runs the stages as "
        "processes on this machine [ray for several replicas, and for stages that need more cores than this machine "
        "has if RAY_ADDRESS names a cluster]",
        choices=("ray", "mp"),
    )
    data_parallel_size: int = option(
        1,
        "number of replicas of the model, on Ray Serve",
        parse=count,
        check=at_least(1),
        metavar="N",
    )
    cpus_per_replica: int | None = option(
        None,
        "cores reserved for each replica or stage on Ray [an equal share of the cluster's]",
        parse=count,
        check=at_least(1),
        metavar="N",
    )

    def without_effect(self, stages: int) -> Iterator[str]:
        """What to tell of the flags that were given and have no effect on a model of `stages` stages."""
        if self.distributed_executor_backend == "mp" and stages == 1:
            yield (
                "--distributed-executor-backend has no effect: mp is for the stages of --pipeline-parallel-size, and "
                "one process has all layers"
            )

    def _contradictions(self) -> Iterator[str]:
        if self.distributed_executor_backend == "mp":
            yield from self._needing(
                ("data_parallel_size", "cpus_per_replica"),
                "--distributed-executor-backend ray, not mp; or start several servers, and let a proxy distribute "
                "requests among them (docs/scale-out.md)",
            )
        elif self.distributed_executor_backend is None and self.data_parallel_size == 1:
            yield from self._needing(
                ("cpus_per_replica",), "--distributed-executor-backend ray, or --data-parallel-size of 2 or more"
            )
