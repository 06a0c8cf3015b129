"""The routes of an application, found by a path at once, where Starlette tries each in turn."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send


class RoutesByPath:
    """Passes a request to the routes that its path may match. If no route is for just this path, `others` gets it.

    Routes keep their order: a route with parameters is tried first if it stands before the path's own route.
    """

    def __init__(self, routes: Sequence[BaseRoute], others: ASGIApp) -> None:
        self._others = others
        own = {route.path for route in routes if isinstance(route, Route) and not route.param_convertors}
        self._routers = {
            path: Router(
                [
                    route
                    for route in routes
                    if not isinstance(route, Route) or route.param_convertors or route.path == path
                ],
                redirect_slashes=False,
            )
            for path in own
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        found = scope["type"] == "http" and not scope.get("root_path")
        router = self._routers.get(scope["path"]) if found else None
        await (self._others if router is None else router)(scope, receive, send)
