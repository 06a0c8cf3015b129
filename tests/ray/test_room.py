"""Cores of stages and replicas that have as many as each other, and fit on the nodes."""

from __future__ import annotations

import pytest

from tidewheel.engine.errors import TidewheelError
from tidewheel.ray.room import check_room, cpus_of_replicas, cpus_of_stages, room_for


@pytest.mark.parametrize(
    ("count", "nodes", "each"),
    [(2, [2.0], 1), (2, [8.0, 4.0], 4), (3, [8.0, 4.0], 4), (3, [8.0, 8.0, 2.0], 2), (3, [2.0], 1), (2, [], 1)],
)
def test_stages_have_as_many_cores_as_each_other(count: int, nodes: list[float], each: int) -> None:
    assert cpus_of_stages(count, nodes) == each


@pytest.mark.parametrize(
    ("count", "nodes", "each"),
    [(2, [8.0, 4.0], 4), (2, [16.0, 2.0], 8), (4, [8.0, 4.0], 2), (3, [2.0], 1), (1, [], 1), (3, [6.0, 5.0], 3)],
)
def test_replicas_have_the_most_cores_that_all_of_them_can_have(count: int, nodes: list[float], each: int) -> None:
    assert cpus_of_replicas(count, nodes) == each
    assert room_for(each, nodes) >= count or each == 1


def test_what_there_is_no_room_for_is_refused() -> None:
    check_room("replicas", 3, 2, [4.0, 3.0], "--data-parallel-size")
    said = "no room for 4 replicas of 2 cores, as Ray counts 7 cores here: lower --data-parallel-size or --cpus-per-rep"
    with pytest.raises(TidewheelError, match=said):
        check_room("replicas", 4, 2, [4.0, 3.0], "--data-parallel-size")
