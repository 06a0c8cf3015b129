"""How formats without JSON write the arguments of a call, as a grammar.

Texts stand as they are between two marks. So their grammar takes any text up to the second mark, or one of the texts
of an `enum`; lengths and patterns are left to the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tidewheel.engine.constraints.depth import resolve
from tidewheel.engine.constraints.json_schema import json_types, part_of
from tidewheel.engine.constraints.structural_tag import (
    Alternatives,
    AnyText,
    Concatenation,
    ConstString,
    Format,
    JsonSchema,
    Regex,
    Tag,
    TagsWithSeparator,
)

from ...generation.structured_output import compact

_DEEPEST = 6  # steps into a schema; what lies deeper is JSON, which all parsers read too
_SAYING_THE_TYPE = frozenset({"type", "title", "description", "default", "examples", "nullable"})
_ANY_BUT_TEXT = ("array", "boolean", "null", "number", "object")


class Nesting(NamedTuple):
    """The texts around the members of an object, around the elements of a list, and around each element."""

    braces: tuple[str, str] = ("", "")
    brackets: tuple[str, str] = ("", "")
    element: tuple[str, str] = ("", "")


class Notation(NamedTuple):
    """An argument is `before`, its value and `after`. A text has `text_before` before it, if that tells it from JSON.
    KEY stands for the argument's name, and TYPE for the JSON type of its value.

    A text has `quote` around it; if that is None, it is JSON. Objects and lists are JSON too, unless there is a
    `nesting`. `others` are other ways to write values of a type, as regular expressions; they are for types of which
    the schema says no more. With a `separator`, the arguments that must be there come first.
    """

    before: str
    after: str = ""
    separator: str = ""
    text_before: str = ""
    quote: str | None = ""
    nesting: Nesting | None = None
    others: Mapping[str, str] = {}

    def format(self, schema: dict[str, Any]) -> Format:
        """The arguments of a call with this schema. Raises ValueError for a schema without their names."""
        part, path = schema, tuple[str, ...]()
        for _ in range(_DEEPEST):
            if "properties" in part or not isinstance(reference := part.get("$ref"), str):
                break
            path = tuple(key.replace("~1", "/").replace("~0", "~") for key in reference.split("/")[1:])
            part = resolve(reference, schema)
            if not isinstance(part, dict):
                raise ValueError(f"there is no {reference} in it")
        if "properties" not in part and part.get("additionalProperties") is not False:
            raise ValueError(
                "it names no properties, which stand in tags in this model's format of calls: list them, or leave out "
                "structured output"
            )
        return self._members(part, schema, path)

    def _members(self, part: dict[str, Any], root: dict[str, Any], path: tuple[str, ...]) -> Format:
        properties, required = part.get("properties", {}), part.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise ValueError("a schema's properties must be an object, and its required a list")
        members = [
            (key in required, self._member(key, value, root, (*path, "properties", key)))
            for key, value in properties.items()
        ]
        if not self.separator:
            return Concatenation([m if needed else Alternatives([ConstString(""), m]) for needed, m in members])
        first = [member for needed, member in members if needed]
        parts: list[Format] = [part for m in first for part in (ConstString(self.separator), m)][1:]
        if others := [member for needed, member in members if not needed]:
            tags = [Tag(self.separator if first else "", member, "") for member in others]
            parts.append(TagsWithSeparator(tags, "" if first else self.separator, at_most=len(tags)))
        return Concatenation(parts)

    def _member(self, key: str, part: Any, root: dict[str, Any], path: tuple[str, ...]) -> Format:
        def filled(text: str, kind: str = "") -> str:
            return text.replace("TYPE", kind).replace("KEY", key)

        types = _types(part, root) if "TYPE" in self.before else ()
        befores: dict[str | None, str] = {kind: filled(self.before, _NAMES.get(kind, kind)) for kind in types}
        befores = befores or {None: filled(self.before)}
        return self._value(part, root, path, befores, filled(self.after), filled(self.text_before))

    def _value(
        self,
        part: Any,
        root: dict[str, Any],
        path: tuple[str, ...],
        befores: Mapping[str | None, str],
        after: str,
        text_before: str = "",
    ) -> Format:
        """A value between two marks. `befores` are the first of them by the value's type, None for any."""
        types, ways = json_types(part, root), list[Format]()
        before = befores.get(None, "")
        if self.quote is not None and (not types or "string" in types):
            begin, end = (text_before or before) + self.quote, self.quote + after
            if (texts := _texts(part)) is None:
                ways.append(Tag(begin, AnyText(), end))
            else:
                ways += [ConstString(begin + text + end) for text in texts]
            if types == {"string"} or not (self.quote or text_before):  # then nothing tells what else it may be
                return _one_of(ways)
            types = (types or {*_ANY_BUT_TEXT}) - {"string"}
            part = {**part, "type": sorted(types)} if isinstance(part, dict) else {"type": sorted(types)}
        if (nested := self._nested(part, types, root, path, before, after)) is not None:
            return _one_of([*ways, nested])
        for kind, begin in befores.items():
            ways.append(Tag(begin, JsonSchema(compact(_alone(part, root, path, kind))), after))
        if isinstance(part, dict) and part.keys() <= _SAYING_THE_TYPE:
            ways += [Tag(before, Regex(self.others[kind]), after) for kind in sorted(types & self.others.keys())]
        return _one_of(ways)

    def _nested(
        self, part: Any, types: set[str], root: dict[str, Any], path: tuple[str, ...], before: str, after: str
    ) -> Format | None:
        """An object whose members are known, or a list; None if it has to be JSON."""
        nesting = self.nesting
        if nesting is None or not isinstance(part, dict) or "$ref" in part or len(path) > _DEEPEST:
            return None
        if types == {"object"} and part.get("properties"):
            start, end = nesting.braces
            return Tag(before + start, self._members(part, root, path), end + after)
        few, most = part.get("minItems", 0), part.get("maxItems")
        is_open = few in (0, 1) and (most is None or (isinstance(most, int) and most > 0))
        if types == {"array"} and isinstance(part.get("items"), dict) and is_open:
            start, end = nesting.brackets
            begin, end_of_element = nesting.element
            element = self._value(part["items"], root, (*path, "items"), {None: begin}, end_of_element)
            elements = TagsWithSeparator([Tag("", element, "")], self.separator, at_least_one=few == 1, at_most=most)
            return Tag(before + start, elements, end + after)
        return None


_NAMES = {"integer": "number"}


def _one_of(ways: list[Format]) -> Format:
    return ways[0] if len(ways) == 1 else Alternatives(ways)  # llguidance bounds how deep parentheses are nested


def _types(part: Any, root: dict[str, Any]) -> list[str]:
    """The types that a value may have beside text."""
    return sorted((json_types(part, root) or {*_ANY_BUT_TEXT}) - {"string"})


def _texts(part: Any) -> list[str] | None:
    """The texts that a value may be, if the schema lists them."""
    if not isinstance(part, dict) or not ("const" in part or isinstance(part.get("enum"), list)):
        return None
    return [value for value in ([part["const"]] if "const" in part else part["enum"]) if isinstance(value, str)]


def _alone(part: Any, root: dict[str, Any], path: tuple[str, ...], kind: str | None) -> dict[str, Any]:
    """The schema of a part without the rest, of one type if `kind` is given."""
    if not isinstance(part, dict):
        part = {} if part is True else {"not": {}}
    alone = {**part_of(root, *path), **{key: part[key] for key in ("type",) if key in part}} if _refers(part) else part
    return alone if kind is None else {**alone, "type": kind}


def _refers(part: Any) -> bool:
    """Whether there is a reference in a schema, whose nesting has been checked."""
    if isinstance(part, list):
        return any(map(_refers, part))
    return isinstance(part, dict) and ("$ref" in part or "$dynamicRef" in part or any(map(_refers, part.values())))
