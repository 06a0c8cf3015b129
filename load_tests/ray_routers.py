"""Tidewheel's replicas behind Ray's own routers, for `routing.py`.

    PYTHONPATH=/src/tidewheel/load_tests serve run ray_routers:app ray_router=prefix-cache-affinity num_replicas=2

Ray's PrefixCacheAffinityRouter reads prompts from calls of a deployment, which Serve's proxies do not make. So it is
part of an ingress, as in Ray Serve LLM. The other routers see what the proxies send them, like Tidewheel's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response

from tidewheel.ray.application import application_of
from tidewheel.ray.deployment import TidewheelServer
from tidewheel.ray.replica_metrics import PATH, ReplicaMetrics

_CHAT = "/v1/chat/completions"
_IN_PROXY = {
    "round-robin": "ray.serve.experimental.round_robin_router.RoundRobinRouter",
    "consistent-hash": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
}
# `ray.serve.llm`, where it is documented, imports what `ray[llm]` installs.
_AFFINITY = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"


@dataclass(frozen=True)
class Chat:
    """A chat request as that router reads it, and its body."""

    messages: list[Any]
    body: bytes


class CalledServer(TidewheelServer):
    """A replica that is called instead of getting HTTP requests."""

    async def chat(self, request: Chat) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        return await self._client.post(_CHAT, request.body)


class Ingress:
    """Answers chat requests with one replica, and requests for metrics with all."""

    def __init__(self, servers: Any) -> None:
        self._servers = servers
        self._metrics = ReplicaMetrics(lambda: servers, "metrics", "tidewheel:")

    async def __call__(self, request: Request) -> Response:
        """The answer."""
        if request.url.path == PATH:
            return Response(await self._metrics.text(names_adapters=True))
        body = await request.body()
        status, answer = await self._servers.chat.remote(Chat(orjson.loads(body)["messages"], body))
        return Response(answer, status, media_type="application/json")


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """The arguments are those of `tidewheel.ray:app`, and `ray_router`."""
    rest = {name: value for name, value in arguments.items() if name != "ray_router"}
    name = arguments["ray_router"]
    if name != "prefix-cache-affinity" and name not in _IN_PROXY:
        raise ValueError(f"ray_router must be prefix-cache-affinity, {', '.join(_IN_PROXY)}, got {name!r}")
    server = application_of(rest)._bound_deployment
    given = server.init_args
    server = server.options(
        request_router_config=RequestRouterConfig(request_router_class=_IN_PROXY.get(name, _AFFINITY))
    )
    if name in _IN_PROXY:
        return server.bind(*given)
    ingress = serve.deployment(Ingress, ray_actor_options={"num_cpus": 0})  # the replicas may need all cores
    return ingress.bind(server.options(func_or_class=CalledServer).bind(*given))
