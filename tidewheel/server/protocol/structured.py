"""How clients ask for structured output: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tidewheel.server.protocol.decode import Unsupported


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema with a name. The schema is always enforced, `strict` or not."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer has to be: any text, a JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsField(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's object of all kinds, of which one may be given."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # there is nothing to fall back to
    structural_tag: Unsupported = None
