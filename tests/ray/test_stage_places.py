"""Where the stages of a pipeline are in a cluster: what each node counts for, and what is refused before Ray starts."""

from __future__ import annotations

from typing import Any

import pytest

from tidewheel import LLM
from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.machine.memory import Memory
from tidewheel.engine.pipeline.speed import StageCores


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"distributed_executor_backend": "ray"}, "needs pipeline_parallel_size of 2 or more"),
        ({"cpus_per_replica": 1}, "--cpus-per-replica needs --distributed-executor-backend ray"),
        ({"distributed_executor_backend": "external"}, "distributed_executor_backend.* ray, mp"),
    ],
)
def test_an_llm_whose_stages_cannot_be_placed(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TidewheelError, match=said):
        LLM(device="cpu", **options)


def test_each_node_counts_by_its_share_of_the_stages() -> None:
    from tidewheel.ray.stage_actor import StagePlace
    from tidewheel.ray.stages import memory_of_all, rooms_of_all

    def place(node: str, memory: Memory) -> StagePlace:
        return StagePlace(node, 1, StageCores(node, 1, 0.0), "x", memory)

    large, small = Memory(120, 90, None, None), Memory(1000, 20, 40, 30)
    apart = [place("a", large), place("b", small)]
    assert memory_of_all(apart, [3, 1]) == Memory(160, 80, None, None)
    assert rooms_of_all(apart) == [90, 20]
    together = [place("a", large), place("a", large)]
    assert memory_of_all(together, [3, 1]) == large  # which the node has once
    assert rooms_of_all([*together, place("b", small)]) == [45, 45, 20]


def test_stages_that_start_again_keep_their_nodes() -> None:
    from tidewheel.ray.stages import kept_order

    assert kept_order(["b", "a", "c"], ["a", "b", "c"]) == [1, 0, 2]
    assert kept_order(["c", "b", "b"], ["a", "b", "b"]) == [0, 1, 2]
    assert kept_order(["b", "d", "c"], ["a", "c", "b"]) == [1, 2, 0]  # a has gone, and d has come
