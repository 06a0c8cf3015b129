"""The metrics of all replicas, where Serve or a replica does not do what it should."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidewheel.ray.replica_metrics import ReplicaMetrics, Told
from tidewheel.server.errors import ApiError


class Handle:
    """A deployment of replicas that tell these metrics, or fail."""

    def __init__(self, told: list[Told | Exception]) -> None:
        self._told = told

    def broadcast(self, method: str) -> Any:
        assert method == "metrics"
        return self

    async def _fetch_replica_results_async(self) -> list[Result]:
        return [Result(one) for one in self._told]


class Result:
    """The answer of one replica."""

    def __init__(self, told: Told | Exception) -> None:
        self._told = told

    async def get_async(self) -> Told:
        if isinstance(self._told, Exception):
            raise self._told
        return self._told


def test_each_series_has_its_replica_and_each_metric_one_head() -> None:
    head = "# HELP t:running What runs.\n# TYPE t:running gauge\n"
    handle = Handle(
        [("a", f'{head}t:running{{model="x y"}} 1.0\n'), ValueError("broken"), ("b", f"{head}t:running 2.0\n")]
    )
    text = asyncio.run(ReplicaMetrics(lambda: handle, "metrics", "t:").text())
    assert text.startswith(f'{head}t:running{{replica="a",model="x y"}} 1.0\nt:running{{replica="b"}} 2.0\n')
    assert "\nt:replicas 3\n" in text
    assert text.endswith("\nt:replicas_silent 1\n")


def test_a_scrape_is_answered_where_serve_has_no_such_deployment() -> None:
    def missing() -> Any:
        raise RuntimeError("the application is being deleted")

    with pytest.raises(ApiError, match="cannot be asked for their metrics: try again"):
        asyncio.run(ReplicaMetrics(missing, "metrics", "t:").text())
