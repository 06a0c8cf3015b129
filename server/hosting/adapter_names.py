"""Adapters that clients load and unload: requests find a model by their names as well."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

import msgspec
from starlette.requests import Request

from tidewheel.engine.errors import ModelError

from ..errors import bad_request
from ..local_path import local_path
from .catalog import Catalog, ModelEntry

_LOAD, _UNLOAD = "load_lora_adapter", "unload_lora_adapter"


class _Adapter(msgspec.Struct):
    lora_name: str = ""


def adapter_of(request: Request, body: bytes | bytearray) -> str | None:
    """The adapter that a request loads or unloads; None for other requests."""
    if local_path(request.scope).removeprefix("/v1").removeprefix("/") not in (_LOAD, _UNLOAD):
        return None
    try:
        return msgspec.json.decode(body, type=_Adapter).lora_name or None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # the model has a better message


def noted(
    request: Request, catalog: Catalog, name: str, entry: ModelEntry, *, is_shared: bool
) -> Callable[[int], None] | None:
    """What is to be told the status of the answer of `entry`. One that `is_shared` is looked for in a store: None.

    Raises ApiError (400) for the name of another model.
    """
    if request.url.path.endswith(f"/{_UNLOAD}"):
        return lambda status: catalog.forget_adapter(name) if status == HTTPStatus.OK else None
    try:
        if is_shared:
            catalog.check_adapter(name, entry)
            return None
        is_new = catalog.know_adapter(name, entry)
    except ModelError as error:
        raise bad_request(str(error), "lora_name") from None
    return lambda status: catalog.forget_adapter(name) if is_new and status != HTTPStatus.OK else None
