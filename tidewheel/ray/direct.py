"""Where HAProxy takes the place of Serve's proxies: it asks a chooser for a replica, then talks to that itself.

RAY_SERVE_ENABLE_HA_PROXY=1 asks Serve for this, from when Ray is started. No token passes through Serve then.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from ray import serve
from ray.exceptions import RayError
from ray.serve._private.common import ReplicaID
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY, RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RunningReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from .policy import PrefixPolicy
from .router import PrefixRouter, given_keys, keys_of

logger = logging.getLogger(__name__)

IS_DIRECT = bool(RAY_SERVE_ENABLE_HA_PROXY)
"""Whether this process was told that HAProxy takes the place of Serve's proxies."""

_NAME = "tidewheel-chooser"
_PATH = "/internal/route"
_MAX_CHOICES = 10_000  # at a time
_ARRIVES_S = 0.02  # for a request to be where it was sent
_LATEST_S = 2.0  # between two looks at a replica that computes
_ANSWERS_S = 1.0


def with_chooser(replicas: serve.Application) -> serve.Application:
    """The application with choosers: HAProxy asks the one on its own node where a request goes."""
    chooser = serve.deployment(
        ReplicaChooser,
        name=_NAME,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MAX_CHOICES,
    )
    return replicas._with_ingress_request_router(chooser.bind(replicas))


class DirectRouter(PrefixRouter):
    """The prefix router of a chooser, which does not send what it chooses a replica for, and hears of no end.

    So what was chosen counts as sent, and it looks how many requests the replica has soon after that. It looks again
    after twice the time as long as there are any.
    """

    def initialize_state(self, most_load: float, max_own: int, loads_models: bool) -> None:
        super().initialize_state(most_load, max_own, loads_models)
        # Some of them may have ended.
        self._policy = PrefixPolicy(most_load, max_own, min_limit=max_own, loads_models=loads_models)
        self._looks: dict[ReplicaID, tuple[float, asyncio.Task[None]]] = {}  # that wait, and how long each does

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        ranked = await super().choose_replicas(candidate_replicas, pending_request)
        keys = None if pending_request is None else given_keys(pending_request)
        if keys is not None and ranked[0] is not candidate_replicas:
            (replica,) = ranked[0]
            self._policy.took(replica.replica_id, keys)
            self._policy.loads.add(replica.replica_id, 1)
            self._look_after(_ARRIVES_S, replica)
        return ranked

    def _look_after(self, seconds: float, replica: RunningReplica) -> None:
        if replica.replica_id in self._looks:
            waits_s, look = self._looks[replica.replica_id]
            if waits_s <= seconds:
                return
            look.cancel()
        look = asyncio.get_running_loop().create_task(self._look(seconds, replica))
        self._looks[replica.replica_id] = (seconds, look)

    async def _look(self, seconds: float, replica: RunningReplica) -> None:
        await asyncio.sleep(seconds)
        del self._looks[replica.replica_id]
        try:
            load = await asyncio.wait_for(replica.get_queue_len(deadline_s=_ANSWERS_S), _ANSWERS_S)
        except (RayError, asyncio.TimeoutError):
            return  # Serve finds out by itself what has become of it
        self.on_new_queue_len_info(replica.replica_id, load)
        if load > 0 and replica.replica_id in self._replicas:
            self._look_after(min(2 * seconds, _LATEST_S), replica)


@serve.ingress()
class ReplicaChooser:
    """Answers HAProxy's question where a request goes, with the name of a replica.

    HAProxy asks with the body of a POST and X-Session-Id. Tidewheel's part of the proxy, which Serve puts before each
    of its HTTP servers, makes keys of them.
    """

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas
        self._replicas._init()  # so that the first request finds its router ready
        if not RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY:
            logger.warning(
                "HAProxy routes by X-Session-Id alone: start Ray with RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY=1, "
                "so that prompts with the same beginning go to the same replica"
            )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application that HAProxy asks."""
        return Starlette(routes=[Route(_PATH, self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        try:
            async with self._replicas.choose_replica(keys_of(request.scope["headers"]), _reserve=False) as selection:
                return JSONResponse({"replica_id": selection._replica.replica_id.to_full_id_str()})
        except DeploymentUnavailableError as error:
            return PlainTextResponse(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
