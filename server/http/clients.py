"""The client of a request, for queues in which clients take turns."""

from __future__ import annotations

from contextvars import ContextVar
from ipaddress import IPv6Address, IPv6Network

from starlette.types import ASGIApp, Receive, Scope, Send

from .api_keys import current_tenant

_network: ContextVar[str] = ContextVar("network", default="")

_IPV6_PREFIX = 64  # bits of an address that identify its owner; the owner may choose the rest freely


def current_client() -> str:
    """A name for the client of the current request: the owner of its API key, or its address if there is one tenant.

    Clients behind one proxy count as one client, unless they have different keys or the proxy sends `x-forwarded-for`.
    A request that does not come from a client, such as a batch's, has its owner or "".
    """
    return current_tenant().owner or _network.get()


class NameClient:
    """Notes the address of each request for `current_client`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _network.set(_network_of((scope.get("client") or ("",))[0]))
        await self.app(scope, receive, send)


def _network_of(host: str) -> str:
    if ":" not in host:  # an address of IPv4, a name, or a Unix socket
        return host
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address), _IPV6_PREFIX), strict=False))
