"""What a request says of the model that is to answer it, read before anything else of its body is."""

from __future__ import annotations

import msgspec

from ..errors import bad_request

_NONE = msgspec.Raw(b"null")


class _Peek(msgspec.Struct):
    model: msgspec.Raw = _NONE
    stream: msgspec.Raw = _NONE
    keep_alive: msgspec.Raw = _NONE


class AskedModel(msgspec.Struct, frozen=True):
    """The model's name, None for the default; and whether the answer is to be streamed."""

    name: str | None
    streams: bool
    keep_alive: msgspec.Raw


def asked_model(body: bytes | bytearray) -> AskedModel:
    """What is asked for by a body of JSON, or by none. The rest of it is not looked at.

    Raises ApiError (400) for what is not a JSON object, or has a name that is no text.
    """
    try:
        peek = msgspec.json.decode(body, type=_Peek) if body else _Peek()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not a JSON object: {error}", code="invalid_json") from None
    try:
        name = msgspec.json.decode(peek.model, type=str | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise bad_request("model must be text: the name of a model", "model") from None
    return AskedModel(name, bytes(peek.stream) == b"true", peek.keep_alive)
