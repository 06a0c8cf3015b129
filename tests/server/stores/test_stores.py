"""Stores that several replicas share: what is put is there for all of them, within bounds."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import redis
from server.redis_servers import redis_cluster, redis_server

from tidewheel.engine.errors import TidewheelError
from tidewheel.server.errors import ApiError
from tidewheel.server.stores import folder, redis_store
from tidewheel.server.stores.base import MAX_VALUE_BYTES, Kind, SharedStore, StoreError
from tidewheel.server.stores.opening import check_store, open_store

THINGS = Kind(name="things")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """It takes two seconds to start."""
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as url:
        yield url


@pytest.fixture(params=["folder", "redis", "cluster"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path)
    elif request.param == "redis":
        with redis_server() as url:
            yield url
    else:
        url = request.getfixturevalue("cluster")
        with redis.Redis.from_url(url) as client:
            client.flushall()
        yield url


def with_two(target: str, work: Callable[[SharedStore, SharedStore], Awaitable[None]]) -> None:
    """Does the work with a store that two replicas have opened."""

    async def do() -> None:
        first, second = open_store(target, None), open_store(target, None)
        try:
            await work(first, second)
        finally:
            await first.close()
            await second.close()

    asyncio.run(do())


def test_what_one_puts_all_have(target: str) -> None:
    async def work(first: SharedStore, second: SharedStore) -> None:
        key = "../../\0 of a client\n" + "x" * 5000
        assert await second.get(THINGS, key) is None
        assert await first.put(THINGS, key, b"\0one\r\n")
        assert await second.get(THINGS, key) == b"\0one\r\n"
        assert not await second.put(THINGS, key, b"two", "new")
        assert await second.put(THINGS, key, b"three", "there")
        assert not await second.put(THINGS, "other", b"four", "there")
        assert await first.values(THINGS) == [b"three"]
        assert await second.values(Kind(name="others")) == []
        assert await second.delete(THINGS, key)
        assert not await first.delete(THINGS, key)
        assert await first.values(THINGS) == []

    with_two(target, work)


def test_one_of_many_is_the_first(target: str) -> None:
    async def work(first: SharedStore, second: SharedStore) -> None:
        puts = [store.put(THINGS, "key", b"%d" % i, "new") for i, store in enumerate([first, second] * 20)]
        were_put = await asyncio.gather(*puts)
        assert sum(were_put) == 1
        assert await first.get(THINGS, "key") == b"%d" % were_put.index(True)

    with_two(target, work)


def test_readers_find_whole_values(target: str) -> None:
    async def work(first: SharedStore, second: SharedStore) -> None:
        values = [bytes([65 + i]) * 50_000 + b"\r\n" for i in range(8)]
        await first.put(THINGS, "key", values[0])
        found = await asyncio.gather(
            *(first.put(THINGS, "key", value) for value in values), *(second.get(THINGS, "key") for _ in range(20))
        )
        assert all(value in values for value in found[len(values) :])

    with_two(target, work)


def test_those_used_last_are_kept(target: str) -> None:
    few = Kind(name="few", most=2, expires_s=5000, renews=True)

    async def work(first: SharedStore, second: SharedStore) -> None:
        for key in "abc":
            await first.put(few, key, key.encode())
            await asyncio.sleep(0.02)  # as file systems' clocks tick
            if key == "b":
                assert await second.get(few, "a") == b"a"
        assert sorted(await second.values(few)) == [b"a", b"c"]

    with_two(target, work)


def age(target: str, seconds: int) -> None:
    """Make a store's entries look as if they were put, and read, `seconds` earlier."""
    if not target.startswith("redis"):
        for file in only_files(Path(target)):
            changed = file.stat().st_mtime - seconds
            os.utime(file, (changed, changed))
        return
    with redis.Redis.from_url(target) as client:
        for key in client.scan_iter():
            if (left_ms := client.pttl(key)) > 0:
                client.pexpire(key, left_ms - 1000 * seconds)
            if client.type(key) == b"zset":
                for member in client.zrange(key, 0, -1):
                    client.zincrby(key, -seconds, member)


def test_values_expire_unless_they_are_used(target: str) -> None:
    short, renewed = Kind(name="short", expires_s=100), Kind(name="renewed", expires_s=100, renews=True)

    async def work(first: SharedStore, second: SharedStore) -> None:
        for kind in (short, renewed):
            await first.put(kind, "key", b"value")
        for _ in range(2):
            assert await second.get(short, "key") == b"value"
            age(target, 60)
            assert await second.get(renewed, "key") == b"value"
        assert await second.get(short, "key") is None
        assert await second.values(short) == []
        assert await second.put(short, "key", b"again", "new")
        age(target, 120)
        assert await second.get(renewed, "key") is None

    with_two(target, work)


def test_what_is_too_large_is_refused(target: str) -> None:
    async def work(first: SharedStore, second: SharedStore) -> None:
        with pytest.raises(ApiError, match="takes at most"):
            await first.put(THINGS, "key", bytes(MAX_VALUE_BYTES + 1))

    with_two(target, work)


def only_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_files_are_private_and_links_are_not_followed(tmp_path: Path) -> None:
    async def work(first: SharedStore, second: SharedStore) -> None:
        await first.put(THINGS, "key", b"value")
        (file,) = only_files(tmp_path)
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        other = tmp_path / "secret"
        other.write_bytes(b"secret")
        file.unlink()
        file.symlink_to(other)
        with pytest.raises(StoreError):
            await second.get(THINGS, "key")
        file.unlink()
        os.mkfifo(file)  # nothing writes to it
        assert await second.get(THINGS, "key") is None

    with_two(str(tmp_path), work)


def test_a_store_that_has_gone_is_a_503() -> None:
    async def work() -> None:
        with redis_server() as url:
            store = open_store(url, None)
            await store.put(THINGS, "key", b"value")
        with pytest.raises(StoreError) as caught:
            await store.get(THINGS, "key")
        assert (caught.value.status, caught.value.code) == (503, "store_unavailable")
        await store.close()

    asyncio.run(work())


def test_a_redis_server_that_is_slow_and_one_that_is_busy_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "_CONNECTIONS", 1)
    monkeypatch.setattr(redis_store, "_TIMEOUT_S", 1.0)

    async def work(url: str) -> list[BaseException | bytes | None]:
        store = open_store(url, None)
        try:
            await store.put(THINGS, "key", b"value")
            with redis.Redis.from_url(url) as client:
                client.client_pause(60_000, all=True)
            monkeypatch.setattr(redis_store, "_TIMEOUT_S", 0.2)  # for a connection; for answers there is a second
            return await asyncio.gather(*(store.get(THINGS, "key") for _ in range(2)), return_exceptions=True)
        finally:
            await store.close()

    with redis_server(real=True) as url:
        slow, busy = asyncio.run(work(url))
    assert isinstance(slow, StoreError)
    assert isinstance(busy, StoreError)
    assert "has not answered for" in slow.message
    assert "is busy: none of 1 connections has become free for 0.2 seconds" in busy.message


def test_a_folder_that_is_slow_and_one_that_is_busy_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network file system is whose server has gone."""
    back = threading.Event()
    monkeypatch.setattr(folder, "_THREADS", 1)
    monkeypatch.setattr(folder, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(folder, "_remove", lambda path: back.wait(30))

    async def work() -> list[BaseException | bool]:
        store = open_store(str(tmp_path), None)
        try:
            return await asyncio.gather(*(store.delete(THINGS, "key") for _ in range(2)), return_exceptions=True)
        finally:
            back.set()
            await store.close()

    slow, busy = asyncio.run(work())
    assert isinstance(slow, StoreError)
    assert isinstance(busy, StoreError)
    assert slow.message.endswith("has not answered for 0.2 seconds")
    assert busy.message.endswith("is busy: it has answered none of 1 earlier requests for 0.2 seconds")


def test_what_cannot_be_opened_is_told_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "redis://user:pass-word@127.0.0.1:1/3?password=pass-word"
    with pytest.raises(TidewheelError, match=r"--shared-store redis://127.0.0.1:1/3 cannot be used") as caught:
        open_store(url, "pass-word")
    assert "pass-word" not in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(TidewheelError, match="name a folder that this process may write to"):
        open_store(str(tmp_path / "file"), None)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(TidewheelError, match=r"pip install 'redis>=") as caught:
        open_store(url, None)
    assert "pass-word" not in str(caught.value)
    assert "redis://" in (check_store("http://somewhere") or "")
    assert "take a Redis cluster" in (check_store("redis+sentinel://somewhere/0") or "")


def test_a_value_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    async def put() -> None:
        store = folder.FolderStore(str(tmp_path))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(StoreError, match="cannot be used"):
                await store.put(THINGS, "key", b"a" * 2000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            await store.close()

    asyncio.run(put())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
