"""The prefix policy as a router of Ray Serve, in each of Serve's proxies."""

from __future__ import annotations

import pickle
import time
from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import Any

from msgspec.structs import replace
from ray.serve._private.common import ReplicaID
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .hash_ring import hash_of
from .policy import Keys, PrefixPolicy
from .prefixes import HEADER, read_keys, session_key, unpacked, unpacked_numbers

_BELIEVED_S = 10.0  # as long as Serve's own cache of loads

HELD = "held"
"""The key of the prefixes that a replica holds in its routing statistics."""

MODELS = "models"
"""The key of the models that a replica has loaded, or loads now, if it has several."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # ray's types are not read
    """Sends a conversation where its prefix lies: see `PrefixPolicy`.

    Serve's proxy gives a router the head of a request and not its body. Its keys come in a header, which `proxy` adds;
    where that is not installed, X-Session-Id alone is known.
    """

    def initialize_state(self, most_load: float, max_own: int, loads_models: bool) -> None:
        """What `request_router_kwargs` has."""
        self._policy: PrefixPolicy[ReplicaID] = PrefixPolicy(most_load, max_own, loads_models=loads_models)
        self._stats: dict[ReplicaID, tuple[str, str]] = {}
        self._sent: Counter[ReplicaID] = Counter()  # requests of this proxy that run
        self._heard: OrderedDict[ReplicaID, float] = OrderedDict()  # when, oldest first

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best replica, then all of them. Serve takes the one with the fewest requests of these."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all of them are full
        self._forget_old_loads()
        chosen = self._policy.choose(_keys(pending_request))
        best = None if chosen is None else self._replicas.get(chosen)
        return [candidate_replicas] if best is None else [[best], candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        self._policy.took(replica_id, _keys(pending_request))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._policy.set_replicas([replica.replica_id for replica in replicas])
        for replica in replicas:
            stats = replica.routing_stats or {}
            held, models = stats.get(HELD, ""), stats.get(MODELS, "")
            if self._stats.get(replica.replica_id) != (held, models):
                self._stats[replica.replica_id] = (held, models)
                self._policy.publish(replica.replica_id, *unpacked(held))
                self._policy.publish_models(replica.replica_id, unpacked_numbers(models))
        for gone in self._stats.keys() - {replica.replica_id for replica in replicas}:
            del self._stats[gone]
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._policy.set_replicas([*self._replicas])

    # What a replica says has the requests of other proxies in it, of whose ends nothing is heard here.

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        if replica_id in self._replicas:
            self._policy.loads.set(replica_id, num_ongoing_requests)
            self._touch(replica_id)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._policy.loads.add(replica_id, 1)
        self._sent[replica_id] += 1
        self._touch(replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._sent[replica_id] -= 1
        if self._sent[replica_id] <= 0:
            del self._sent[replica_id]

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        super().decrement_queue_len_cache(replica_id)
        self._policy.loads.add(replica_id, -1)

    def _touch(self, replica_id: ReplicaID) -> None:
        self._heard[replica_id] = time.monotonic()
        self._heard.move_to_end(replica_id)

    def _forget_old_loads(self) -> None:
        """Count this proxy's own requests alone where nothing was heard for a while."""
        while self._heard and next(iter(self._heard.values())) < time.monotonic() - _BELIEVED_S:
            replica_id, _ = self._heard.popitem(last=False)
            if replica_id in self._replicas:
                self._policy.loads.set(replica_id, self._sent[replica_id])


def keys_of(headers: Collection[tuple[bytes, bytes]]) -> Keys:
    """What a request with this head is known by."""
    keys = Keys()
    for name, value in headers:
        if name == HEADER:
            keys = read_keys(value)
    session = session_key(headers)
    return keys if session is None else replace(keys, session=session)


def _keys(pending: PendingRequest | None) -> Keys:
    if pending is None:
        return Keys()
    if (given := given_keys(pending)) is not None:
        return given
    keys = keys_of(_headers(pending))
    if keys.session is None and pending.metadata.session_id:
        return replace(keys, session=hash_of(b"session " + pending.metadata.session_id.encode()))
    return keys


def given_keys(pending: PendingRequest) -> Keys | None:
    """The keys that a chooser gives in the place of a request; None for a request."""
    given = pending.args[0] if pending.args else None
    return given if isinstance(given, Keys) else None


def _headers(pending: PendingRequest) -> list[tuple[bytes, bytes]]:
    """The head of a proxied request. It was pickled by this same process."""
    if not pending.metadata.is_http_request or not pending.args or not isinstance(pending.args[0], bytes):
        return []
    request: Any = pickle.loads(pending.args[0])
    return [(bytes(name), bytes(value)) for name, value in request.asgi_scope.get("headers", ())]
