"""`/`, the page for people, and the files of `server/web` that it is made of, under `/web/`."""

from __future__ import annotations

import hashlib
from functools import cache
from http import HTTPStatus
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parents[1] / "web"
_MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".woff2": "font/woff2",
}

# Nothing but our own files, and no string ever becomes markup or code: a model's words cannot act, and a mistake of
# ours could not make them.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # images that a person attaches to a message
        "font-src 'self'",
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
    "/" if path == _FOLDER / "index.html" else f"/web/{path.relative_to(_FOLDER).as_posix()}": path
    for path in sorted(_FOLDER.rglob("*"))
    if path.suffix in _MEDIA_TYPES
}

WEB_PATHS = frozenset(_FILES)
"""Where the page's files are. They hold no secret, so they need no API key."""


def web_routes() -> list[Route]:
    """The page's files."""

    async def serve(request: Request) -> Response:
        path = _FILES.get(f"/web{request.path_params['name']}")
        if path is None:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return _answer(request, path)

    # One route for all files, as every request's path is compared with each route. It takes /web too, which would
    # else be redirected to /web/.
    return [file_route("/", _FILES["/"]), Route("/web{name:path}", serve)]


def file_route(address: str, path: Path) -> Route:
    """A file that a page is made of, under the strict policy. Browsers ask whether it is new each time."""

    async def serve(request: Request) -> Response:
        return _answer(request, path)

    return Route(address, serve)


def _answer(request: Request, path: Path) -> Response:
    content, etag = _read(path)
    headers = {**_HEADERS, "etag": etag}
    known = request.headers.get("if-none-match", "")
    if known == "*" or etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(content, headers=headers, media_type=_MEDIA_TYPES[path.suffix])


@cache
def _read(path: Path) -> tuple[bytes, str]:
    """A file and its ETag. Read once, as the page that is served must not change while it runs."""
    content = path.read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'
