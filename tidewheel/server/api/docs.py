"""`/openapi.json`, and `/docs`, a page that shows it, made of the files in `tidewheel/server/web_docs`."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

import orjson
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from tidewheel.server.openapi import document

_FOLDER = Path(__file__).parents[1] / "web_docs"
_FILES = {"/docs": "index.html", "/docs/docs.css": "docs.css", "/docs/docs.js": "docs.js"}
_HEADERS = {
    "cache-control": "no-cache",
    # Nothing but our own files, and no string ever becomes markup or code.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

DOCS_PATHS = frozenset({"/openapi.json", *_FILES})
"""Where the document and the page are. They hold no secret, so they need no API key."""


def docs_routes(described: Sequence[BaseRoute], open_paths: Set[str] | None) -> list[Route]:
    """The document of these routes, and the page. All but `open_paths` need an API key; None: there are no keys."""
    documents: dict[str, bytes] = {}

    async def openapi(request: Request) -> Response:
        root_path: str = request.scope.get("root_path", "")
        if root_path not in documents:
            # Made at the first request, for start-up's sake.
            documents.clear()
            documents[root_path] = orjson.dumps(document(described, root_path=root_path, open_paths=open_paths))
        return Response(documents[root_path], media_type="application/json")

    return [Route("/openapi.json", openapi), *(_page(path, name) for path, name in _FILES.items())]


def _page(path: str, name: str) -> Route:
    async def serve(request: Request) -> Response:
        return FileResponse(_FOLDER / name, headers=_HEADERS)

    return Route(path, serve)
