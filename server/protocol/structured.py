"""How clients ask for structured output: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tidewheel.engine.constraints.structural_tag import Format


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema with a name. The schema is always enforced, `strict` or not."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TaggedSchema(msgspec.Struct, forbid_unknown_fields=True):
    """JSON of a schema between two texts."""

    begin: str
    schema: dict[str, Any]
    end: str


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer has to be: any text, a JSON object, JSON that matches a schema, or what a structural tag says.

    `schema` is llama.cpp's place for a JSON schema. A structural tag is in `format`. In vLLM's older form it is free
    text with `structures` after `triggers`.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    format: Format | None = None
    structures: list[TaggedSchema] | None = None
    triggers: list[str] | None = None


class StructuredOutputsField(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's object of all kinds. Only one of them may be given."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # there is nothing to fall back to
    structural_tag: str | None = None
