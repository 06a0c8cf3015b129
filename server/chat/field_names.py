"""Errors that name a field of a chat completion's body, renamed to the field that the client sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tidewheel.engine.errors import InvalidRequestError

from ..errors import ApiError, as_api_error


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Within the block, errors name the fields of a translated body as the client wrote them.

    `names` maps paths in the chat completion's body, such as `messages[1].tool_calls[0].function`, to the client's
    paths where these differ. If several paths lead to a field, the longest is used.
    """
    try:
        yield
    except (ApiError, InvalidRequestError) as failure:
        error = as_api_error(failure)
        if error.param is not None:
            renamed = _renamed(error.param, names)
            if error.message.startswith(error.param):
                error.message = renamed + error.message[len(error.param) :]
            error.param = renamed
        raise error from None


def _renamed(param: str, names: Mapping[str, str]) -> str:
    for name in sorted(names, key=len, reverse=True):
        if param == name or param.startswith((f"{name}.", f"{name}[")):
            return names[name] + param[len(name) :]
    return param
