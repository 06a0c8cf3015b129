"""Structured output: from what a body asks for to the one thing that the engine compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tidewheel.engine.constraints.depth import check_nesting
from tidewheel.engine.constraints.grammar import StructuredOutput
from tidewheel.engine.constraints.source import choice_rules
from tidewheel.engine.constraints.structural_tag import (
    EmbeddedGrammar,
    Format,
    JsonSchema,
    Regex,
    Tag,
    TriggeredTags,
    decode_format,
)

from ..errors import ApiError, bad_request
from ..protocol.decode import unsupported
from ..protocol.sampling import GenerationBody
from ..protocol.structured import ResponseFormat, StructuredOutputsField

# One line, with the space after a comma or colon that models are used to, or without.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def structured_output(body: GenerationBody) -> StructuredOutput | None:
    """What the body's answers have to match; None for any text.

    Raises ApiError (400) for fields that contradict each other or cannot be served.
    """
    whitespace = body.guided_whitespace_pattern
    asked = [
        _from_response_format(body.response_format),
        _from_structured_outputs(body.structured_outputs),
        _from_json(body.guided_json, "guided_json", whitespace_pattern=whitespace),
        _from_text("regex", body.guided_regex, "guided_regex"),
        _from_choice(body.guided_choice, "guided_choice"),
        _from_text("grammar", body.guided_grammar, "guided_grammar"),
    ]
    if whitespace is not None and body.guided_json is None:
        raise bad_request("guided_whitespace_pattern goes with guided_json only", "guided_whitespace_pattern")
    return _only_one(asked)


def json_schema_output(
    schema: dict[str, Any],
    param: str,
    *,
    whitespace_pattern: str | None = None,
    whitespace_flexible: bool = True,
) -> StructuredOutput:
    """An answer that is JSON of this schema; `param` is the request's field that errors are to name.

    Whitespace within the JSON matches `whitespace_pattern`, a regular expression; without `whitespace_flexible` there
    is none.
    """
    check_depth(schema, param)
    options: dict[str, Any] = {}
    if whitespace_pattern is not None:
        options["whitespace_pattern"] = whitespace_pattern
    if not whitespace_flexible:
        options["whitespace_flexible"] = False
    if options:
        schema = {**schema, "x-guidance": options}
    return StructuredOutput("json_schema", json.dumps(schema, ensure_ascii=False), param)


def check_depth(schema: Any, param: str) -> None:
    """Raises ApiError (400) for a schema that is nested too deeply to be read; `param` is the request's field."""
    try:
        check_nesting(schema)
    except ValueError as error:
        raise bad_request(f"{param} cannot be compiled: {error}", param) from None


def tag_output(tag: Format, param: str) -> StructuredOutput:
    """An answer that a structural tag describes; `param` is the request's field that errors are to name."""
    return StructuredOutput("structural_tag", msgspec.json.encode(tag).decode(), param)


def as_format(output: StructuredOutput) -> Format:
    """A structured output as a part of a structural tag."""
    if output.kind == "json_schema":
        return JsonSchema(json.loads(output.text))
    if output.kind == "regex":
        return Regex(output.text)
    if output.kind == "choice":
        return EmbeddedGrammar(choice_rules(json.loads(output.text)))
    return EmbeddedGrammar(output.text) if output.kind == "grammar" else decode_format(output.text)


def compact(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with JSON laid out compactly, unless it says itself how: room for whitespace tempts weak models."""
    own = schema.get("x-guidance", {})
    return {**schema, "x-guidance": {**_COMPACT, **own}} if isinstance(own, dict) else schema


def _only_one(asked: Sequence[StructuredOutput | None]) -> StructuredOutput | None:
    given = [output for output in asked if output is not None]
    if len(given) > 1:
        first, second = (output.param for output in given[:2])
        raise bad_request(f"{first} and {second} cannot both be given: an answer can match only one of them", second)
    return given[0] if given else None


def _from_response_format(response_format: ResponseFormat | None) -> StructuredOutput | None:
    if response_format is None:
        return None
    tag, wanted = _from_tag(response_format), response_format.json_schema
    if response_format.schema is not None:
        if wanted is not None or response_format.type not in ("json_object", "json_schema"):
            raise bad_request(
                'response_format.schema goes only with "type": "json_object" or "json_schema", and without json_schema',
                "response_format.schema",
            )
        return json_schema_output(response_format.schema, "response_format.schema")
    if (wanted is None) == (response_format.type == "json_schema"):
        rule = "is required with" if wanted is None else "goes only with"
        raise bad_request(
            f'response_format.json_schema {rule} "type": "json_schema"',
            "response_format.json_schema",
            "missing_required_parameter" if wanted is None else None,
        )
    if wanted is not None:
        if not _SCHEMA_NAME.fullmatch(wanted.name):
            param = "response_format.json_schema.name"
            raise bad_request(f"{param} must be 1 to 64 letters, digits, underscores or dashes", param)
        return json_schema_output(wanted.schema, "response_format.json_schema.schema")
    if response_format.type == "json_object":
        return json_schema_output({"type": "object"}, "response_format")
    return tag


def _from_tag(wanted: ResponseFormat) -> StructuredOutput | None:
    given = [name for name in ("format", "structures", "triggers") if getattr(wanted, name) is not None]
    if wanted.type != "structural_tag":
        if given:
            param = f"response_format.{given[0]}"
            raise bad_request(f'{param} goes only with "type": "structural_tag"', param)
        return None
    if given not in (["format"], ["structures", "triggers"]):
        raise bad_request(
            'response_format of "type": "structural_tag" must have a format, or structures and triggers',
            "response_format.format",
            None if given else "missing_required_parameter",
        )
    if wanted.format is not None:
        return tag_output(wanted.format, "response_format.format")
    tags = [Tag(part.begin, JsonSchema(part.schema), part.end) for part in wanted.structures or []]
    return tag_output(TriggeredTags(wanted.triggers or [], tags), "response_format.structures")


def _from_structured_outputs(wanted: StructuredOutputsField | None) -> StructuredOutput | None:
    if wanted is None:
        return None
    if wanted.disable_additional_properties:
        param = "structured_outputs.disable_additional_properties"
        raise unsupported(param, ' unless it is false: say "additionalProperties": false in the schema')
    flexible = not wanted.disable_any_whitespace
    whitespace = wanted.whitespace_pattern
    any_object = {"type": "object"} if wanted.json_object else None
    asked = [
        _from_json(schema, f"structured_outputs.{name}", whitespace_pattern=whitespace, whitespace_flexible=flexible)
        for name, schema in (("json", wanted.json), ("json_object", any_object))
    ]
    if not any(asked) and (whitespace is not None or not flexible):
        param = f"structured_outputs.{'disable_any_whitespace' if whitespace is None else 'whitespace_pattern'}"
        raise bad_request(f"{param} goes with json and json_object only", param)
    if not flexible and whitespace is not None:
        param = "structured_outputs.whitespace_pattern"
        raise bad_request(f"{param} and disable_any_whitespace cannot both be given", param)
    asked += [
        _from_text("regex", wanted.regex, "structured_outputs.regex"),
        _from_choice(wanted.choice, "structured_outputs.choice"),
        _from_text("grammar", wanted.grammar, "structured_outputs.grammar"),
        _from_tag_text(wanted.structural_tag, "structured_outputs.structural_tag"),
    ]
    output = _only_one(asked)
    if output is None:
        raise bad_request(
            "structured_outputs needs one of json, json_object, regex, choice, grammar and structural_tag",
            "structured_outputs",
        )
    return output


def _from_json(schema: dict[str, Any] | str | None, param: str, **whitespace: Any) -> StructuredOutput | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(f"{param} is not a JSON schema: {error}", param) from None
    return json_schema_output(schema, param, **whitespace)


def _from_tag_text(text: str | None, param: str) -> StructuredOutput | None:
    if text is None:
        return None
    try:
        wanted = msgspec.json.decode(text, type=ResponseFormat)
        output = _from_tag(wanted)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"{param} is not a structural tag: {error}", param) from None
    except ApiError as error:
        raise bad_request(f"{param} is not a structural tag: {error.message}", param) from None
    if output is None:
        raise bad_request(f'{param} must be a JSON object of "type": "structural_tag"', param)
    return replace(output, param=param)


def _from_text(kind: Any, text: str | None, param: str) -> StructuredOutput | None:
    if text is None:
        return None
    if not text:
        raise _empty(param)
    return StructuredOutput(kind, text, param)


def _from_choice(choices: Sequence[str] | None, param: str) -> StructuredOutput | None:
    if choices is None:
        return None
    if not choices:
        raise _empty(param)
    return StructuredOutput("choice", json.dumps(choices), param)


def _empty(param: str) -> ApiError:
    return bad_request(f"{param} is empty", param)
