"""RedisStore: a Redis database, by redis-py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from tidewheel.engine.errors import TidewheelError

from .base import PREFIX, Kind, StoreError, When, check_size, name_of

_CONNECTIONS = 32
_TIMEOUT_S = 5.0


class RedisStore:
    """A SharedStore in the database of `url`. `password` goes before one that is in the URL.

    A kind has a sorted set of its names, by when they were put or read last. Raises TidewheelError if redis-py is not
    installed, or if the database cannot be reached.
    """

    def __init__(self, url: str, password: str | None = None) -> None:
        self.shown = _without_password(url)
        try:
            import redis
            import redis.asyncio
        except ImportError as error:
            hint = "pip install 'tidewheel[redis]'"
            raise TidewheelError(f"--shared-store {self.shown} needs redis-py: {hint} ({error})") from error
        settings: dict[str, Any] = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
        if password is not None:
            settings["password"] = password
        self._error = redis.RedisError
        try:
            with redis.Redis.from_url(url, **settings) as client:
                client.ping()
            pool = redis.asyncio.BlockingConnectionPool.from_url(
                url, max_connections=_CONNECTIONS, timeout=_TIMEOUT_S, **settings
            )
        except (self._error, OSError, ValueError) as error:
            raise TidewheelError(f"--shared-store {self.shown} cannot be used: {error}") from error
        self._client: Any = redis.asyncio.Redis.from_pool(pool)

    async def get(self, kind: Kind, key: str) -> bytes | None:
        """See SharedStore."""
        name = _value_name(kind, name_of(key))
        if kind.expires_s is None or not kind.renews:
            async with self._asked():
                found: bytes | None = await self._client.get(name)
                return found
        async with self._pipeline() as commands:
            commands.get(name)
            commands.pexpire(name, _milliseconds(kind))
            commands.zadd(_index_name(kind), {name_of(key): time.time()}, xx=True)
            found, *_ = await commands.execute()
        return found

    async def put(self, kind: Kind, key: str, value: bytes, when: When = "always") -> bool:
        """See SharedStore."""
        check_size(value)
        name, index, now = name_of(key), _index_name(kind), time.time()
        async with self._pipeline() as commands:
            commands.set(_value_name(kind, name), value, px=_milliseconds(kind), nx=when == "new", xx=when == "there")
            commands.zadd(index, {name: now}, xx=when == "there")
            if kind.expires_s is not None:
                commands.zremrangebyscore(index, "-inf", now - kind.expires_s)
            if kind.most is not None:
                commands.zrange(index, 0, -kind.most - 1)
            was_put, *_, oldest = await commands.execute()
            if kind.most is not None and oldest:
                names = [one.decode() for one in oldest]
                commands.delete(*(_value_name(kind, one) for one in names))
                commands.zrem(index, *names)
                await commands.execute()
        return bool(was_put)

    async def delete(self, kind: Kind, key: str) -> bool:
        """See SharedStore."""
        async with self._pipeline() as commands:
            commands.delete(_value_name(kind, name_of(key)))
            commands.zrem(_index_name(kind), name_of(key))
            count, _ = await commands.execute()
        return bool(count)

    async def values(self, kind: Kind) -> list[bytes]:
        """See SharedStore."""
        async with self._asked():
            names = [one.decode() for one in await self._client.zrange(_index_name(kind), 0, -1)]
            found = await self._client.mget([_value_name(kind, name) for name in names]) if names else []
        return [value for value in found if value is not None]

    async def close(self) -> None:
        """See SharedStore."""
        await self._client.aclose(close_connection_pool=True)

    @asynccontextmanager
    async def _asked(self) -> AsyncIterator[None]:
        try:
            yield
        except (self._error, OSError, asyncio.TimeoutError) as error:
            raise StoreError(f"the store at {self.shown} cannot be used: {error}") from error

    @asynccontextmanager
    async def _pipeline(self) -> AsyncIterator[Any]:
        """Commands that are one transaction."""
        async with self._asked(), self._client.pipeline(transaction=True) as commands:
            yield commands


def _index_name(kind: Kind) -> str:
    return f"{PREFIX}:{kind.name}"


def _value_name(kind: Kind, name: str) -> str:
    return f"{PREFIX}:{kind.name}:{name}"


def _milliseconds(kind: Kind) -> int | None:
    return None if kind.expires_s is None else int(kind.expires_s * 1000)


def _without_password(url: str) -> str:
    """The scheme, host and database of a URL: user names and queries may be secret too."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
