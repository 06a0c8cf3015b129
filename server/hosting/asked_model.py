"""What a request says of the model that is to answer it, read before anything else of its body is."""

from __future__ import annotations

import msgspec

from ..errors import bad_request
from ..ollama.keep_alive import keep_alive_s

_NONE = msgspec.Raw(b"null")
_EMPTY = (b"null", b'""', b"[]")


class _Peek(msgspec.Struct):
    model: msgspec.Raw = _NONE
    stream: msgspec.Raw = _NONE
    keep_alive: msgspec.Raw = _NONE


class AskedModel(msgspec.Struct, frozen=True):
    """The model's name, None for the default; and whether the answer is to be streamed.

    `keep_alive_s` is how long the model is to stay loaded, as in Ollama: negative until others need the memory.
    """

    name: str | None
    streams: bool
    keep_alive_s: float | None


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
    return AskedModel(name, bytes(peek.stream) == b"true", keep_alive_s(msgspec.json.decode(peek.keep_alive)))


def without_keep_alive(body: bytes | bytearray) -> bytearray:
    """A body of JSON for the model itself, which knows nothing of it."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    del fields["keep_alive"]
    return bytearray(msgspec.json.encode(fields))


class _Prompt(msgspec.Struct):
    prompt: msgspec.Raw = _NONE
    suffix: msgspec.Raw = _NONE
    images: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE


def has_no_prompt(body: bytes | bytearray) -> bool:
    """Whether a body for Ollama's API asks for no answer: clients load and unload models so."""
    prompt = msgspec.json.decode(body, type=_Prompt)
    return all(bytes(getattr(prompt, field)) in _EMPTY for field in prompt.__struct_fields__)
