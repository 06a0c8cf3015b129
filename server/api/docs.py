"""`/openapi.json`, and `/docs`, a page that shows it, made of the files in `server/web_docs`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from pathlib import Path

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..openapi.document import document
from .web import file_route

_FOLDER = Path(__file__).parents[1] / "web_docs"
_FILES = {"/docs": "index.html", "/docs/docs.css": "docs.css", "/docs/docs.js": "docs.js"}

DOCS_PATHS = frozenset({"/openapi.json", *_FILES})
"""Where the document and the page are. They hold no secret, so they need no API key."""


def docs_routes(described: Sequence[BaseRoute], open_paths: Set[str] | None, *, refuses_unknown: bool) -> list[Route]:
    """The document of these routes, and the page. The rest is as for `document`."""
    written: dict[str, bytes] = {}  # by root path; a server has one

    def write(root_path: str) -> bytes:
        return orjson.dumps(
            document(described, root_path=root_path, open_paths=open_paths, refuses_unknown=refuses_unknown)
        )

    async def openapi(request: Request) -> Response:
        root_path: str = request.scope.get("root_path", "")
        content = written.get(root_path)
        if content is None:
            # At the first request, for start-up's sake, and in a thread, as it takes a while.
            content = await asyncio.to_thread(write, root_path)
            written.clear()
            written[root_path] = content
        return Response(content, media_type="application/json")

    return [Route("/openapi.json", openapi), *(file_route(path, _FOLDER / name) for path, name in _FILES.items())]
