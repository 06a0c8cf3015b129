"""The server's errors as the engine's, which have no HTTP status."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http import HTTPStatus

from tidewheel.engine.errors import InvalidRequestError, TidewheelError
from tidewheel.server.errors import ApiError


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Within it, an ApiError becomes an InvalidRequestError if the request is at fault, else a TidewheelError."""
    try:
        yield
    except ApiError as error:
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise TidewheelError(error.message) from None
        raise InvalidRequestError(error.message, error.param) from None
