"""The error answers, in OpenAI's shape and in Anthropic's. `ApiError` makes them."""

from __future__ import annotations

import msgspec


class ErrorDetails(msgspec.Struct):
    """What was wrong; `param` names the field at fault, `code` the kind of mistake where programs may want to know."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """An error."""

    error: ErrorDetails


class AnthropicErrorDetails(msgspec.Struct):
    """What was wrong."""

    type: str
    message: str


class AnthropicErrorResponse(msgspec.Struct, tag="error"):
    """An error of `/v1/messages`."""

    error: AnthropicErrorDetails
    request_id: str | None
