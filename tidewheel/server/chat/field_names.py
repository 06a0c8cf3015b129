"""Errors that speak of a chat completion's body, in the words of the endpoint that a client called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tidewheel.engine.errors import InvalidRequestError
from tidewheel.server.errors import ApiError, as_api_error

_MESSAGE = re.compile(r"messages\[(\d+)\]")


@contextmanager
def renamed_fields(names: Mapping[str, str], message_paths: Sequence[str]) -> Iterator[None]:
    """Within the block, errors name the fields of a translated body as the client wrote them.

    `names` has the endpoint's own name for each field that has another one in a chat completion's body, a field within
    a field as `response_format.json_schema`. `message_paths` says of each message which part of the client's body it
    was made from.
    """
    try:
        yield
    except (ApiError, InvalidRequestError) as failure:
        error = as_api_error(failure)
        if error.param is None:
            raise
        renamed = _renamed(error.param, names, message_paths)
        error.message = error.message.replace(error.param, renamed, 1)
        error.param = renamed
        raise error from None


def _renamed(param: str, names: Mapping[str, str], message_paths: Sequence[str]) -> str:
    if (found := _MESSAGE.match(param)) and int(found[1]) < len(message_paths):
        return message_paths[int(found[1])] + param[found.end() :]
    for name in sorted(names, key=len, reverse=True):
        if param == name or param.startswith((f"{name}.", f"{name}[")):
            return names[name] + param[len(name) :]
    return param
