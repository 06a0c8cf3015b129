"""What takes a right that not every API key has."""

from __future__ import annotations

from http import HTTPStatus

from ..errors import ApiError
from .api_keys import current_tenant


def require_administrator() -> None:
    """Raises ApiError (403) unless the current tenant may change the server for all."""
    if not current_tenant().administers:
        raise _forbidden("this changes the server for everyone, which needs a key with the right admin", "admin")


def require_priority(priority: int) -> None:
    """Raises ApiError (403) for a priority before the usual one, unless the current tenant may have it."""
    if priority < 0 and not current_tenant().prioritizes:
        raise _forbidden(
            "a priority below 0 takes precedence over others' requests, which needs a key with the right priority",
            "priority",
            "priority",
        )


def _forbidden(what: str, mark: str, param: str | None = None) -> ApiError:
    how = f"the server's operator marks keys with '{mark}' in its --api-key-file, or gives them as --admin-api-key"
    return ApiError(HTTPStatus.FORBIDDEN, f"{what}: {how}", param=param, code="key_not_allowed")
