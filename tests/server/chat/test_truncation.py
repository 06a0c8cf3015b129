"""Turns go round the clients, and no client has two at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Scope

from tidewheel.server.fair_queue import Turns
from tidewheel.server.http.clients import NameClient, current_client


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_turns_go_round() -> None:
    async def main() -> None:
        turns, order = Turns(1), list[str]()

        async def work(client: str) -> None:
            await turns.take(client, 10)
            order.append(client)
            await asyncio.sleep(0)
            turns.give_back(client)

        await asyncio.gather(*(work(client) for client in "aaaabbc"))
        assert "".join(order) == "abcabaa"

    run(main())


@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["stay", "time out", "cancel"])), max_size=30),
    count=st.integers(1, 3),
)
def test_no_turn_is_lost(steps: list[tuple[str, str]], count: int) -> None:
    async def main() -> None:
        turns, active = Turns(count), list[str]()

        async def work(client: str, timeout_s: float) -> None:
            try:
                await turns.take(client, timeout_s)
            except TimeoutError:
                return
            active.append(client)
            assert len(active) <= count
            assert active.count(client) == 1
            await asyncio.sleep(0)
            active.remove(client)
            turns.give_back(client)

        tasks = [asyncio.create_task(work(client, 0 if end == "time out" else 10)) for client, end in steps]
        await asyncio.sleep(0)
        for task, (_, end) in zip(tasks, steps, strict=True):
            if end == "cancel" and not active:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [task.exception() for task in tasks if not task.cancelled()] == [None] * sum(
            not task.cancelled() for task in tasks
        )
        assert turns.waiting == 0
        for client in "abc"[:count]:  # all are free again
            await turns.take(client, 0.001)

    run(main())


def test_who_waits_is_told_of_the_end() -> None:
    async def main() -> None:
        turns = Turns(1)
        await turns.take("a", 1)
        waiting = asyncio.create_task(turns.take("b", 10))
        await asyncio.sleep(0)
        turns.close(RuntimeError("over"))
        for late in (waiting, asyncio.create_task(turns.take("c", 10))):
            with pytest.raises(RuntimeError, match="over"):
                await late

    run(main())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::2:3", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),  # IPv4, on a socket that takes both
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("", "", True),
        ("testclient", "10.0.0.1", False),
    ],
)
def test_clients_have_names(one: str, other: str, same: bool) -> None:
    names: list[str] = []

    async def note(scope: Scope, receive: Any, send: Any) -> None:
        names.append(current_client())

    async def main() -> None:
        for host in (one, other):
            scope = {"type": "http", "client": (host, 1) if host else None, "headers": [(b"x-api-key", host.encode())]}
            await NameClient(note)(scope, None, None)  # type: ignore[arg-type]

    run(main())
    assert (names[0] == names[1]) == same
