"""Request bodies to typed structs, with errors that name the field as a client wrote it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import orjson

from tidewheel.server.errors import ApiError, bad_request

Unsupported: TypeAlias = None
"""The type of a parameter that this server knows of and does not have: clients may send it as null only."""

T = TypeVar("T", bound=msgspec.Struct)

OPTIONAL_TAGS = "x-optional-tags"

_INSTEAD = {
    "ec_transfer_params": "encode and prefill on this server, which keeps no caches elsewhere",
    "early_stopping": "a beam search ends as soon as no beam can become better than those that have ended",
    "kv_transfer_params": "prefill and decode on this server, which keeps no caches elsewhere",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "logprob_token_ids": "use logprobs",
    "prompt_embeds": "send text or token ids",
    "repetition_detection": "use frequency_penalty or repetition_penalty",
    "return_token_offsets": "use echo with logprobs, which has text_offset",
    "stream_interval": "every chunk is sent when its tokens are there; join chunks as you read them",
    "suffix": "write the model's own fill-in-the-middle tokens into the prompt",
}


def documented(**keywords: float) -> msgspec.Meta:
    """JSON schema keywords for `/openapi.json`, of a range that the engine checks, which also words the error."""
    return msgspec.Meta(extra_json_schema=keywords)


def optional_tags(*tags: str) -> msgspec.Meta:
    """Says in `/openapi.json` that in a list of structs these tags may lack, which a body's preparation adds."""
    return msgspec.Meta(extra_json_schema={OPTIONAL_TAGS: list(tags)})


_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*?)`")
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*?)`")
_UNKNOWN_TYPE = re.compile(r"^Invalid value (?P<value>'.*')$")


class BodyDecoder(Generic[T]):
    """Decodes JSON bodies of one type. Raises ApiError (400) naming the field at fault.

    `prepare` may change a body before it is validated, for protocols that let a `type` be left out. It gets whatever
    JSON a client sent; integers that 64 bits do not hold are floats, so that all of it can be written again.
    """

    def __init__(self, body_type: type[T], prepare: Callable[[Any], None] | None = None) -> None:
        self._type = body_type
        self._prepare = prepare
        self._decoder = msgspec.json.Decoder(body_type)
        self._fields = [field.encode_name for field in msgspec.structs.fields(body_type)]

    def __call__(self, body: bytes) -> T:
        try:
            if self._prepare is None:
                return self._decoder.decode(body)
            raw = orjson.loads(body)
            self._prepare(raw)
            return msgspec.convert(raw, self._type, str_keys=True)
        except msgspec.ValidationError as error:
            raise self._invalid(str(error)) from None
        except (msgspec.DecodeError, orjson.JSONDecodeError, UnicodeDecodeError) as error:
            raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
        except RecursionError:
            raise bad_request("the body is nested too deeply", code="invalid_json") from None

    def _invalid(self, text: str) -> ApiError:
        located = _PATH.search(text)
        path = located["path"] if located else ""
        reason = text[: located.start()] if located else text
        if unknown := _UNKNOWN.match(reason):
            return self._unknown_field(path, unknown["field"])
        if missing := _MISSING.match(reason):
            param = _join(path, missing["field"])
            return bad_request(f"{param} is required", param, "missing_required_parameter")
        if reason.startswith("Expected `null`"):
            return unsupported(path)
        if path.endswith("type") and (unknown := _UNKNOWN_TYPE.match(reason)):
            return unsupported(path, f": {unknown['value']}")
        if not path:
            return bad_request(f"the body must be a JSON object: {reason}")
        return bad_request(f"{path}: {reason[0].lower()}{reason[1:]}", path, "invalid_type")

    def _unknown_field(self, path: str, field: str) -> ApiError:
        param = _join(path, field)
        close = difflib.get_close_matches(field, self._fields, 1) if not path else []
        hint = f"; did you mean {close[0]}?" if close else ""
        return bad_request(f"unknown parameter {param}{hint}", param, "unknown_parameter")


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def unsupported(param: str, detail: str = "") -> ApiError:
    """A 400 for a parameter, or a value of one, that other servers have and this one has not."""
    if not detail and param in _INSTEAD:
        detail = f": {_INSTEAD[param]}"
    return bad_request(f"{param} is not supported by this server{detail}", param, "unsupported_parameter")
