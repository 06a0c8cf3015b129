"""The application around the endpoints: middleware, the page, the documents, the shapes of errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from .api.aliases import aliases
from .api.docs import DOCS_PATHS, docs_routes
from .api.web import WEB_PATHS, web_routes
from .app_options import AppOptions
from .app_resources import AppResources
from .errors import exception_handlers
from .http.auth import HEALTH_PATHS, METRICS_PATHS, ApiKeyAuth
from .http.clients import NameClient
from .http.hosts import AllowedHosts
from .http.json_limits import JsonLimits
from .http.middleware import BodyLimit, JsonOnly, RequestId
from .http.path_normalization import PathNormalization
from .http.routes_by_path import RoutesByPath
from .pace import Paced
from .telemetry.tracing import TraceContext


def app_of(
    routes: Sequence[Route],
    options: AppOptions,
    resources: AppResources,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
    *,
    max_values: int,
    has_images: bool = False,
) -> Starlette:
    """The application of these endpoints. A body may have `max_values` values in its JSON, and images."""
    routes = [*routes, *(web_routes() if options.web_ui else ())]
    app = Starlette(
        routes=[*routes, *aliases(routes)],
        middleware=_middleware(options, resources, max_values, has_images=has_images),
        exception_handlers=exception_handlers(),
        lifespan=lifespan,
    )
    if options.docs:
        app.router.routes += docs_routes(
            app.routes,
            _open_paths(options) - WEB_PATHS if resources.keys else None,  # a POST to the root needs a key
            refuses_unknown=options.unknown_parameters == "refuse",
        )
    app.router.middleware_stack = RoutesByPath(app.routes, app.router.middleware_stack)
    return app


def _open_paths(options: AppOptions) -> Set[str]:
    """What needs no API key."""
    open_paths = frozenset() if options.protect_health else HEALTH_PATHS
    if not options.protect_metrics:
        open_paths |= METRICS_PATHS
    if options.web_ui:
        open_paths |= WEB_PATHS
    if options.docs:
        open_paths |= DOCS_PATHS
    return open_paths


def _middleware(options: AppOptions, resources: AppResources, max_values: int, *, has_images: bool) -> list[Middleware]:
    """All middleware, outermost first. A browser's preflight request carries no key, so CORS comes before keys."""
    middleware = [Middleware(Paced, open_paths=HEALTH_PATHS | METRICS_PATHS)]
    if options.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_credentials=options.allow_credentials,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            expose_headers=("x-request-id", "retry-after"),
        )
        middleware.append(cors)
    hosts = []
    if options.allowed_hosts and "*" not in options.allowed_hosts:
        # Probes and Prometheus ask by the addresses of single machines.
        hosts = [Middleware(AllowedHosts, allowed=options.allowed_hosts, open_paths=HEALTH_PATHS | METRICS_PATHS)]
    middleware += [
        Middleware(
            RequestId,
            root_path=(options.root_path or "").rstrip("/"),
            send_header=options.request_id_headers,
            access_log=options.log_access,
            unlogged_paths=(WEB_PATHS | DOCS_PATHS) - {"/", "/docs", "/openapi.json"},
            unlogged_successes=frozenset(options.disable_access_log_for_endpoints),
        ),
        Middleware(PathNormalization),
        *hosts,
        Middleware(BodyLimit, max_bytes=options.body_limit(has_images=has_images)),
        Middleware(JsonLimits, max_values=max_values),
        *resources.middleware,
    ]
    if resources.tracer is not None:
        middleware.append(Middleware(TraceContext))
    if resources.keys:
        middleware.append(Middleware(ApiKeyAuth, keys=resources.keys, open_paths=_open_paths(options)))
    return [*middleware, Middleware(NameClient), Middleware(JsonOnly)]
