"""The metrics of all replicas, where Serve or a replica does not do what it should."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tidewheel.ray.prefixes import HeldPrefixes
from tidewheel.ray.replica_app import ReplicaApp
from tidewheel.ray.replica_metrics import ReplicaMetrics, ReplicaText
from tidewheel.server.errors import ApiError


class Handle:
    """A deployment of replicas that tell these metrics, or fail."""

    def __init__(self, texts: list[ReplicaText | Exception]) -> None:
        self._texts = texts

    def broadcast(self, method: str) -> Any:
        assert method == "metrics"
        return self

    async def _fetch_replica_results_async(self) -> list[Result]:
        return [Result(one) for one in self._texts]


class Result:
    """The answer of one replica."""

    def __init__(self, text: ReplicaText | Exception) -> None:
        self._text = text

    async def get_async(self) -> ReplicaText:
        if isinstance(self._text, Exception):
            raise self._text
        return self._text


def test_each_series_has_its_replica_and_each_metric_one_head() -> None:
    head = "# HELP t:running What runs.\n# TYPE t:running gauge\n"
    handle = Handle(
        [("a", f'{head}t:running{{model="x y"}} 1.0\n'), ValueError("broken"), ("b", f"{head}t:running 2.0\n")]
    )
    text = asyncio.run(ReplicaMetrics(lambda: handle, "metrics", "t:").text(names_adapters=True))
    assert text.startswith(f'{head}t:running{{replica="a",model="x y"}} 1.0\nt:running{{replica="b"}} 2.0\n')
    assert "\nt:replicas 3\n" in text
    assert text.endswith("\nt:replicas_silent 1\n")


def test_a_scrape_is_answered_where_serve_has_no_such_deployment() -> None:
    def missing() -> Any:
        raise RuntimeError("the application is being deleted")

    with pytest.raises(ApiError, match="cannot be asked for their metrics: try again"):
        asyncio.run(ReplicaMetrics(missing, "metrics", "t:").text(names_adapters=True))


ADAPTERS = (
    "# HELP t:lora_requests_info The adapters.\n# TYPE t:lora_requests_info gauge\n"
    't:lora_requests_info{running_lora_adapters="poems"} 1.0\n'
)
RUNNING = "t:running 2.0\n"


@pytest.mark.parametrize("has_key", [True, False])
def test_a_replica_names_adapters_to_those_whom_its_application_names_them(has_key: bool) -> None:
    async def own(request: Request) -> Response:
        return PlainTextResponse(ADAPTERS + RUNNING if "x-api-key" in request.headers else RUNNING)

    metrics = ReplicaMetrics(lambda: Handle([("a", ADAPTERS + RUNNING), ("b", ADAPTERS + RUNNING)]), "metrics", "t:")
    app = ReplicaApp(Starlette(routes=[Route("/metrics", own)]), "a", HeldPrefixes(), metrics, is_several=True)

    async def scraped() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica") as client:
            return (await client.get("/metrics", headers={"x-api-key": "key"} if has_key else {})).text

    text = asyncio.run(scraped())
    assert text.count("t:running{") == 2
    assert text.count("poems") == (2 if has_key else 0)
    assert ("lora" in text) == has_key
