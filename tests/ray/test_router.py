"""The replicas' loads as routers know them, seen by their choices. The replicas here answer as Serve's do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from tidewheel.ray.policy import Keys

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")


def deployment() -> Any:
    """The deployment that the replicas belong to."""
    from ray.serve._private.common import DeploymentID

    return DeploymentID(name="tidewheel", app_name="tidewheel")


class Replica:
    """One whose number of requests the test sets."""

    def __init__(self, name: str) -> None:
        from ray.serve._private.common import ReplicaID

        self.replica_id = ReplicaID(name, deployment())
        self.actor_id = SimpleNamespace(hex=lambda: name)
        self.node_id = self.availability_zone = "here"
        self.multiplexed_model_ids: frozenset[str] = frozenset()
        self.routing_stats: dict[str, Any] = {}
        self.max_ongoing_requests = 100
        self.load = 0
        self.looks = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.looks += 1
        return self.load

    def update_replica_info(self, info: Any) -> None: ...


class Router:
    """A router of replicas, and where it sends requests."""

    def __init__(self, kind: str, replicas: list[Replica], loads_models: bool) -> None:
        from ray.serve._private.common import DeploymentHandleSource

        from tidewheel.ray.direct import DirectRouter
        from tidewheel.ray.router import PrefixRouter

        self.replicas = replicas
        router_of: dict[str, type[PrefixRouter]] = {"prefix": PrefixRouter, "direct": DirectRouter}
        self.router = router_of[kind](deployment(), DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        self.router.initialize_state(most_load=1.5, max_own=8, loads_models=loads_models)
        self.router.update_replicas(replicas)  # type: ignore[arg-type]

    async def choose(self, keys: Keys | None = None) -> str:
        """The first choice, by name."""
        from ray.serve._private.common import RequestMetadata
        from ray.serve.request_router import PendingRequest

        metadata = RequestMetadata(request_id="1", internal_request_id="1")
        pending = PendingRequest(args=[keys], kwargs={}, metadata=metadata) if keys is not None else None
        ranked = await self.router.choose_replicas(self.replicas, pending)  # type: ignore[arg-type]
        return str(ranked[0][0].replica_id.unique_id)


def run(kind: str, test: Callable[[Router], Coroutine[Any, Any, None]], loads_models: bool = False) -> None:
    async def begin() -> None:
        router = Router(kind, [Replica("a"), Replica("b")], loads_models)
        await until_idle()  # Serve looks at new ones by itself
        for replica in router.replicas:
            replica.looks = 0
        await test(router)

    asyncio.run(begin())


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110  # there is no event of it
        await asyncio.sleep(0.001)


async def until_idle() -> None:
    """No look goes on or is to come."""
    await until(lambda: len(asyncio.all_tasks()) == 1)


def test_what_a_replica_said_long_ago_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tidewheel.ray.router.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def test(router: Router) -> None:
        router.router.on_new_queue_len_info(router.replicas[0].replica_id, 8)
        assert {await router.choose() for _ in range(64)} == {"b"}
        now[0] += 9
        assert {await router.choose() for _ in range(64)} == {"b"}
        now[0] += 2
        assert {await router.choose() for _ in range(64)} == {"a", "b"}

    run("prefix", test)


def test_replicas_say_which_models_they_have_loaded() -> None:
    from tidewheel.ray.prefixes import model_key, packed_numbers
    from tidewheel.ray.router import MODELS

    async def test(router: Router) -> None:
        for has_it in router.replicas:
            for replica in router.replicas:
                names = ["coder"] if replica is has_it else []
                replica.routing_stats = {MODELS: packed_numbers([*map(model_key, names)])}
            router.router.update_replicas(router.replicas)  # type: ignore[arg-type]
            chosen = {await router.choose(Keys(session=i, model=model_key("coder"))) for i in range(6)}
            assert chosen == {has_it.replica_id.unique_id}

    run("direct", test, loads_models=True)


SESSION = Keys(session=5)


def test_what_was_chosen_counts_as_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewheel.ray.direct._ARRIVES_S", 3600.0)

    async def test(router: Router) -> None:
        chosen = [await router.choose(SESSION) for _ in range(9)]
        assert chosen[:8] == [chosen[0]] * 8
        assert chosen[8] != chosen[0]
        counts = Counter([await router.choose(Keys()) for _ in range(200)])
        assert max(counts.values()) - min(counts.values()) < 20

    run("direct", test)


def test_a_chooser_looks_whether_requests_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewheel.ray.direct._ARRIVES_S", 0.001)

    async def test(router: Router) -> None:
        names = {await router.choose(SESSION)}
        for count in range(1, 20):
            await until_idle()
            assert sum(replica.looks for replica in router.replicas) == count
            names.add(await router.choose(SESSION))
        assert len(names) == 1

    run("direct", test)


def test_a_chooser_looks_as_long_as_a_replica_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewheel.ray.direct._ARRIVES_S", 0.001)
    monkeypatch.setattr("tidewheel.ray.direct._LATEST_S", 0.002)

    async def test(router: Router) -> None:
        router.replicas[0].load = router.replicas[1].load = 9
        name = await router.choose(SESSION)
        (busy,) = (replica for replica in router.replicas if replica.replica_id.unique_id == name)
        await until(lambda: busy.looks >= 5)
        assert await router.choose(SESSION) != name
        for replica in router.replicas:
            replica.load = 0
        await until_idle()
        assert len({await router.choose(SESSION) for _ in range(4)}) == 1

    run("direct", test)


def test_a_replica_that_does_not_answer_is_left_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewheel.ray.direct._ARRIVES_S", 0.001)
    monkeypatch.setattr("tidewheel.ray.direct._ANSWERS_S", 0.01)

    async def test(router: Router) -> None:
        for replica in router.replicas:
            monkeypatch.setattr(replica, "get_queue_len", lambda *, deadline_s: asyncio.Event().wait())
        await router.choose(SESSION)
        await until_idle()
        assert await router.choose(SESSION) in ("a", "b")

    run("direct", test)
