"""Who a request is from, for queues in which each client has a place."""

from __future__ import annotations

from contextvars import ContextVar
from ipaddress import IPv6Network, ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

_current: ContextVar[str] = ContextVar("client", default="")

_IPV6_PREFIX = 64  # bits of an address that its owner was given; the rest is the owner's choice


def current_client() -> str:
    """A name for the client of the request that is being answered: its address, with its API key if keys are asked for.

    Clients behind one proxy are one client, unless they have different keys or the proxy's `x-forwarded-for` is used.
    """
    return _current.get()


class NameClient:
    """Sets `current_client`. With `has_keys`, the request's API key has been checked already."""

    def __init__(self, app: ASGIApp, *, has_keys: bool) -> None:
        self.app = app
        self._has_keys = has_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = _network((scope.get("client") or ("",))[0])
            if self._has_keys:  # without keys a client could have as many names as it likes
                headers = Headers(scope=scope)
                name += " " + (headers.get("x-api-key") or headers.get("authorization", ""))
            _current.set(name)
        await self.app(scope, receive, send)


def _network(host: str) -> str:
    try:
        address = ip_address(host)
    except ValueError:  # a Unix socket, or a name
        return host
    if address.version == 4:
        return host
    return str(IPv6Network((int(address), _IPV6_PREFIX), strict=False))
