"""Who a request is from, for queues in which each client has a place."""

from __future__ import annotations

from contextvars import ContextVar
from ipaddress import IPv6Network, ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

_current: ContextVar[str] = ContextVar("client", default="")

_IPV6_PREFIX = 64  # bits of an address that identify its owner, who may choose the rest freely


def current_client() -> str:
    """A name for the client of the current request: its address, and its API key if the server has keys.

    Clients behind one proxy count as one client, unless they have different keys or the proxy sends `x-forwarded-for`.
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
            if self._has_keys:  # keys are not checked otherwise, and a client could take as many names as it likes
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
