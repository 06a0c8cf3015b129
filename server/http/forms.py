"""Where a form may be sent instead of JSON: uploads of files."""

from __future__ import annotations

from starlette.types import Scope

from ..local_path import local_path

_UPLOADS = ("/v1/files", "/files")


def is_upload(scope: Scope) -> bool:
    """Whether a request uploads a file. Its body is read piece by piece in a thread, and may be a form."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return local_path(scope).rstrip("/") in _UPLOADS
