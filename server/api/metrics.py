"""`/metrics`, Prometheus' text format."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..http.api_keys import STRANGER, current_tenant
from ..openapi.document import operation

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector


def metrics_routes(*collectors: Collector, named: Sequence[Collector]) -> list[Route]:
    """The endpoint that Prometheus scrapes. These collectors get registries of their own.

    What `named` ones tell has names that clients gave: it is for those who have a key, if the server has any.
    """
    registries: tuple[CollectorRegistry, CollectorRegistry] | None = None

    @operation("Metrics in Prometheus' text format", response=str, media_type="text/plain")
    async def scrape(request: Request) -> Response:
        nonlocal registries
        if registries is None:
            # Imported at the first scrape, for start-up's sake, and in a thread, for other requests' sake.
            registries = await asyncio.to_thread(lambda: (_registry(collectors), _registry([*collectors, *named])))
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        registry = registries[current_tenant() != STRANGER]
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return [Route("/metrics", scrape)]


def _registry(collectors: Sequence[Collector]) -> CollectorRegistry:
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    ProcessCollector(registry=registry)
    return registry
