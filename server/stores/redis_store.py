"""RedisStore: a Redis database or a cluster of Redis servers, by redis-py."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.install_hint import install_command

from .base import INSTEAD_OF_SENTINEL, PREFIX, Kind, StoreError, When, check_size, name_of

logger = logging.getLogger(__name__)

_CONNECTIONS = 32
_TIMEOUT_S = 5.0  # for a connection that is free, and for an answer


class RedisStore:
    """A SharedStore in the database of `url`, or in the cluster that its server is one of. `password` goes before one
    that is in the URL.

    A kind has a sorted set of its names, by when they were put or read last. In a cluster all of a kind has one slot,
    as transactions need. Raises TidewheelError if redis-py is not installed, or if the database cannot be used.
    """

    def __init__(self, url: str, password: str | None = None) -> None:
        self.shown = _without_password(url)
        try:
            import redis
            import redis.asyncio
            from redis.backoff import NoBackoff
        except ImportError as error:
            hint = install_command("redis")
            raise TidewheelError(f"--shared-store {self.shown} needs redis-py: {hint} ({error})") from error
        settings: dict[str, Any] = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
        if password is not None:
            settings["password"] = password
        # One that has been idle may be closed. What took too long may have been done, and would take as long again.
        once_more = NoBackoff(), 1, (redis.ConnectionError,)
        self._timeouts = (redis.TimeoutError, asyncio.TimeoutError)
        self._errors = (redis.RedisError, redis.exceptions.RedisClusterException, OSError, asyncio.TimeoutError)
        self._room = asyncio.Semaphore(_CONNECTIONS)  # a cluster's client does not wait for a connection
        self._client: Any
        try:
            with redis.Redis.from_url(url, **settings, retry=redis.retry.Retry(*once_more)) as client:
                mode = _mode(client)
            settings["max_connections"] = _CONNECTIONS
            self._is_cluster = mode == "cluster"
            if mode == "sentinel":
                raise ValueError(f"it is a Sentinel, {INSTEAD_OF_SENTINEL}")
            if self._is_cluster:
                if url.startswith("unix"):
                    raise ValueError("it is one server of a cluster: name it by redis:// or rediss://")
                if not hasattr(redis.asyncio.cluster, "TransactionStrategy"):
                    raise ValueError(f"clusters need a newer redis-py than {redis.__version__}: pip install -U redis")
                redis.cluster.RedisCluster.from_url(url, **settings).close()  # all of its nodes can be reached
                self._client = redis.asyncio.RedisCluster.from_url(url, **settings)
            else:
                retry = redis.asyncio.retry.Retry(*once_more)
                self._client = redis.asyncio.Redis.from_url(url, **settings, retry=retry)
        except (*self._errors, ValueError) as error:
            raise TidewheelError(f"--shared-store {self.shown} cannot be used: {error}") from error

    async def get(self, kind: Kind, key: str) -> bytes | None:
        """See SharedStore."""
        name = self._value_name(kind, name_of(key))
        if kind.expires_s is None or not kind.renews:
            async with self._asked():
                found: bytes | None = await self._client.get(name)
                return found
        async with self._pipeline() as commands:
            commands.get(name)
            commands.pexpire(name, _milliseconds(kind))
            commands.zadd(self._index_name(kind), {name_of(key): time.time()}, xx=True)
            found, *_ = await commands.execute()
        return found

    async def put(self, kind: Kind, key: str, value: bytes, when: When = "always") -> bool:
        """See SharedStore."""
        check_size(value)
        name, index, now = name_of(key), self._index_name(kind), time.time()
        async with self._pipeline() as commands:
            commands.set(
                self._value_name(kind, name), value, px=_milliseconds(kind), nx=when == "new", xx=when == "there"
            )
            commands.zadd(index, {name: now}, xx=when == "there")
            if kind.expires_s is not None:
                commands.zremrangebyscore(index, "-inf", now - kind.expires_s)
            if kind.most is not None:
                commands.zrange(index, 0, -kind.most - 1)
            was_put, *_, oldest = await commands.execute()
            if kind.most is not None and oldest:
                names = [one.decode() for one in oldest]
                commands.delete(*(self._value_name(kind, one) for one in names))
                commands.zrem(index, *names)
                await commands.execute()
        return bool(was_put)

    async def delete(self, kind: Kind, key: str) -> bool:
        """See SharedStore."""
        async with self._pipeline() as commands:
            commands.delete(self._value_name(kind, name_of(key)))
            commands.zrem(self._index_name(kind), name_of(key))
            count, _ = await commands.execute()
        return bool(count)

    async def values(self, kind: Kind) -> list[bytes]:
        """See SharedStore."""
        async with self._asked():
            names = [one.decode() for one in await self._client.zrange(self._index_name(kind), 0, -1)]
            found = await self._client.mget([self._value_name(kind, name) for name in names]) if names else []
        return [value for value in found if value is not None]

    async def close(self) -> None:
        """See SharedStore."""
        await self._client.aclose()

    def _index_name(self, kind: Kind) -> str:
        name = f"{PREFIX}:{kind.name}"
        return f"{{{name}}}" if self._is_cluster else name

    def _value_name(self, kind: Kind, name: str) -> str:
        return f"{self._index_name(kind)}:{name}"

    @asynccontextmanager
    async def _asked(self) -> AsyncIterator[None]:
        try:
            await asyncio.wait_for(self._room.acquire(), _TIMEOUT_S)
        except asyncio.TimeoutError:
            raise StoreError(
                f"the store at {self.shown} is busy: none of {_CONNECTIONS} connections has become free for "
                f"{_TIMEOUT_S:g} seconds; send the request again"
            ) from None
        try:
            yield
        except self._timeouts as error:
            raise StoreError(f"the store at {self.shown} has not answered for {_TIMEOUT_S:g} seconds") from error
        except self._errors as error:
            raise StoreError(
                f"the store at {self.shown} cannot be used: {str(error) or type(error).__name__}"
            ) from error
        finally:
            self._room.release()

    @asynccontextmanager
    async def _pipeline(self) -> AsyncIterator[Any]:
        """Commands that are one transaction."""
        async with self._asked(), self._client.pipeline(transaction=True) as commands:
            yield commands


def _mode(client: Any) -> str:
    """The kind of server at a URL: "standalone", "cluster" or "sentinel". Raises redis-py's errors."""
    import redis

    client.ping()
    try:
        return str(client.info("server").get("redis_mode", "standalone"))
    except redis.ResponseError as error:
        logger.warning("The shared store does not say what it is, so it is treated as a single server: INFO: %s", error)
        return "standalone"


def _milliseconds(kind: Kind) -> int | None:
    return None if kind.expires_s is None else int(kind.expires_s * 1000)


def _without_password(url: str) -> str:
    """The scheme, host and database of a URL: user names and queries may be secret too."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
