"""Keywords of JSON schemas that llguidance refuses although they demand nothing, or can be said otherwise.

Schemas that programs make are full of them: pydantic's sets have `uniqueItems`, zod's records `propertyNames`. What
demands something that no grammar can say is left, and refused, except for `uniqueItems`, which is dropped.
"""

from __future__ import annotations

from typing import Any

from .depth import TEXT_KEYS

FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
"""The formats of strings that are enforced. Others are annotations, as JSON Schema has it."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_ANYTHING: tuple[Any, ...] = (True, {})
_NO_OBJECT_PARTS = frozenset("properties patternProperties $ref allOf anyOf oneOf if then else".split())
_NO_ITEMS_PARTS = frozenset("items $ref allOf anyOf oneOf if then else contains".split())


def without_idle_keywords(schema: Any) -> Any:
    """The schema without keywords that demand nothing, and with others said as llguidance takes them.

    It recurses for each level, so the nesting of the schema must have been checked.
    """
    if isinstance(schema, list):
        return [without_idle_keywords(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in TEXT_KEYS:
            made[keyword] = value
        elif keyword in _MAPS and isinstance(value, dict):
            made[keyword] = {name: without_idle_keywords(part) for name, part in value.items()}
        else:
            made[keyword] = without_idle_keywords(value)
    _drop_idle(made)
    _name_properties(made)
    _count_contained(made)
    _close(made)
    return made


def _drop_idle(schema: dict[str, Any]) -> None:
    if isinstance(schema.get("uniqueItems"), bool):  # no grammar can say it
        del schema["uniqueItems"]
    if isinstance(name := schema.get("format"), str) and name not in FORMATS:
        del schema["format"]
    for keyword in ("unevaluatedProperties", "unevaluatedItems"):
        if schema.get(keyword) in _ANYTHING:
            schema.pop(keyword, None)
    if schema.get("not") is False:
        del schema["not"]
    if "if" not in schema or not ("then" in schema or "else" in schema):
        for keyword in ("if", "then", "else"):
            schema.pop(keyword, None)
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        value = schema.get(keyword)
        if isinstance(value, dict) and all(part in (True, {}, []) for part in value.values()):
            del schema[keyword]


def _name_properties(schema: dict[str, Any]) -> None:
    """Say `propertyNames` by the properties themselves, where nothing else says which there are."""
    names = schema.get("propertyNames")
    if isinstance(names, dict):
        names = {key: value for key, value in names.items() if (key, value) != ("type", "string")}
    if names in _ANYTHING:
        del schema["propertyNames"]
        return
    if not isinstance(names, dict) or _NO_OBJECT_PARTS & schema.keys():
        return
    value = schema.get("additionalProperties", True)
    listed = names.get("enum", [names.get("const")])
    if names.keys() == {"pattern"} and isinstance(names["pattern"], str):
        said = {"patternProperties": {names["pattern"]: value}}
    elif len(names) == 1 and isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        said = {"properties": dict.fromkeys(listed, value)}
    else:
        return
    del schema["propertyNames"]
    schema |= {**said, "additionalProperties": False}


def _count_contained(schema: dict[str, Any]) -> None:
    """Drop `contains` where it may be missing, and say it by the number of items where any item will do."""
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    fewest, longest = schema.get("minItems", 0), schema.get("maxItems", most)
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    elif least == 0 and most is None:
        del schema["contains"], schema["minContains"]
    elif schema["contains"] in _ANYTHING and all(isinstance(n, int | None) for n in (least, fewest, most, longest)):
        for keyword in ("contains", "minContains", "maxContains"):
            schema.pop(keyword, None)
        schema["minItems"] = max(least or 0, fewest or 0)
        if most is not None:
            schema["maxItems"] = min(most, longest)


def _close(schema: dict[str, Any]) -> None:
    """Say that nothing may be unevaluated by what no other keyword could have evaluated."""
    combined = _NO_OBJECT_PARTS - {"properties", "patternProperties"}
    if schema.get("unevaluatedProperties") is False and not (combined | {"additionalProperties"}) & schema.keys():
        del schema["unevaluatedProperties"]
        schema["additionalProperties"] = False
    if schema.get("unevaluatedItems") is False and "prefixItems" in schema and not _NO_ITEMS_PARTS & schema.keys():
        del schema["unevaluatedItems"]
        schema["items"] = False
