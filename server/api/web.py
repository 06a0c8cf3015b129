"""`/`, the page for people, and the files of `server/web` that it is made of, under `/web/`."""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parents[1] / "web"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

# Nothing but our own files, and no string ever becomes markup or code: a model's words cannot act, and a mistake of
# ours could not make them.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    # A new version of the server shows at the next load; until then a load costs a 304 a file.
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_FILES = {
    "/" if path.name == "index.html" else f"/web/{path.name}": path
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _MEDIA_TYPES
}

WEB_PATHS = frozenset(_FILES)
"""Where the page's files are. They hold no secret, so they need no API key."""


def web_routes() -> list[Route]:
    """The page's files, each at its own address."""
    return [file_route(address, path) for address, path in _FILES.items()]


def file_route(address: str, path: Path) -> Route:
    """A file that a page is made of, under the strict policy. Browsers ask whether it is new each time."""
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": etag}

    async def serve(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if known == "*" or etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(content, headers=headers, media_type=_MEDIA_TYPES[path.suffix])

    return Route(address, serve)
