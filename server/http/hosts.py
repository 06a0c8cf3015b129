"""The `Host` header: the check that a request is for a name of this server's."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from tidewheel.engine.errors import quoted

from ..errors import ApiError, error_response
from ..host_names import plain_host
from ..local_path import local_path

_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+))(?::[0-9]{0,5})?", re.ASCII)


class AllowedHosts:
    """Answers 421 to requests for other hosts than `allowed`, on all paths except `open_paths`.

    A web page may let its own name lead to this machine. It is recognized by that name, which the browser sends. HTTP
    requires one such header, so a request with none or several is answered with 400.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], open_paths: Set[str]) -> None:
        self.app = app
        self._names = {plain_host(host) for host in allowed}
        self._endings = tuple(plain_host(host)[1:] for host in allowed if host.startswith("*."))
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and local_path(scope) not in self._open_paths:
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(given) != 1:
                error = ApiError(
                    HTTPStatus.BAD_REQUEST,
                    f"a request must have one Host header, got {len(given)}: send the name that the server is known by",
                    param="host",
                    code="invalid_host",
                )
                await error_response(error)(scope, receive, send)
                return
            if not self._is_allowed(given[0]):
                error = ApiError(
                    HTTPStatus.MISDIRECTED_REQUEST,
                    f"this server is not known by the host {quoted(given[0])}: use a name that it is known by, or "
                    "ask its operator to add this one to --allowed-hosts",
                    param="host",
                    code="host_not_allowed",
                )
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _is_allowed(self, value: str) -> bool:
        parts = _HOST.fullmatch(value.strip())
        if parts is None:
            return False
        host = plain_host(parts["ipv6"] or parts["name"])
        return host in self._names or host.endswith(self._endings)
