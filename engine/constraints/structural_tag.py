"""Structural tags: answers made of constants, schemas, tags and free text, with the names of xgrammar and vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from .json_schema import json_types, part_of


class ConstString(msgspec.Struct, tag="const_string", forbid_unknown_fields=True):
    """Exactly this text. Names of special tokens in it stand for those tokens."""

    value: str


class JsonSchema(msgspec.Struct, tag="json_schema", forbid_unknown_fields=True):
    """JSON that follows a schema."""

    json_schema: dict[str, Any]


class Regex(msgspec.Struct, tag="regex", forbid_unknown_fields=True):
    """Text that a regular expression matches."""

    pattern: str


class EmbeddedGrammar(msgspec.Struct, tag="grammar", forbid_unknown_fields=True):
    """Text that follows a grammar, in Lark or EBNF."""

    grammar: str


class AnyText(msgspec.Struct, tag="any_text", forbid_unknown_fields=True):
    """Any text, up to the end of the tag around it, or else up to the end of the answer."""


class QwenXmlParameter(msgspec.Struct, tag="qwen_xml_parameter", forbid_unknown_fields=True):
    """An object's properties as `<parameter=KEY>VALUE</parameter>`, in order. Strings are not quoted."""

    json_schema: dict[str, Any]


class Concatenation(msgspec.Struct, tag="sequence", forbid_unknown_fields=True):
    """All of these, one after the other."""

    elements: list[Format]


class Alternatives(msgspec.Struct, tag="or", forbid_unknown_fields=True):
    """One of these."""

    elements: list[Format]


class Tag(msgspec.Struct, tag="tag", forbid_unknown_fields=True):
    """`content` between two texts."""

    begin: str
    content: Format
    end: str


class TriggeredTags(msgspec.Struct, tag="triggered_tags", forbid_unknown_fields=True):
    """Free text and tags in turn. One of `triggers` begins a tag. `at_least_one`: the answer begins with a tag."""

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(msgspec.Struct, tag="tags_with_separator", forbid_unknown_fields=True):
    """Tags and nothing else. `at_most` limits their number; other servers do not have this field."""

    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False
    at_most: Annotated[int, msgspec.Meta(ge=1)] | None = None


Format: TypeAlias = (
    ConstString
    | JsonSchema
    | Regex
    | EmbeddedGrammar
    | AnyText
    | QwenXmlParameter
    | Concatenation
    | Alternatives
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)

decode_format: Callable[[str], Format] = msgspec.json.Decoder(Format).decode


def schemas_in(tag: Any, pointer: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON schemas in a structural tag's JSON, each with its JSON pointer."""
    for key, value in enumerate(tag) if isinstance(tag, list) else tag.items() if isinstance(tag, dict) else ():
        if key == "json_schema" and isinstance(value, dict):
            yield f"{pointer}/{key}", value
        else:
            yield from schemas_in(value, f"{pointer}/{key}")


def compose(tag: Format, special_ids: Mapping[str, int], source: Callable[[str, Any], str]) -> str:
    """llguidance's grammar of a structural tag.

    `special_ids` are special tokens, which texts may contain. `source` makes llguidance's grammar of a part, which is
    of one of StructuredOutput's kinds. Raises ValueError.
    """
    composer = _Composer(special_ids, source)
    start = composer.expression(tag, is_last=True)
    lark = "\n".join(["TEXT: /(?s:.*)/", f"start: {start}", *composer.rules])
    return json.dumps({"grammars": [{"lark_grammar": lark}, *composer.parts]})


class _Composer:
    """Writes Lark: an expression for each format. What an expression cannot say goes into `rules` and `parts`."""

    def __init__(self, special_ids: Mapping[str, int], source: Callable[[str, Any], str]) -> None:
        self.rules: list[str] = []
        self.parts: list[dict[str, Any]] = []
        self._special_ids = special_ids
        names = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._source = source

    def expression(self, tag: Format, *, is_last: bool) -> str:
        """The expression of a format. `is_last`: nothing can follow it in the answer."""
        if isinstance(tag, ConstString):
            return self._constant(tag.value)
        if isinstance(tag, JsonSchema):
            return self._part("json_schema", tag.json_schema)
        if isinstance(tag, Regex):
            return self._part("regex", tag.pattern)
        if isinstance(tag, EmbeddedGrammar):
            return self._part("grammar", tag.grammar)
        if isinstance(tag, QwenXmlParameter):
            return self._parameters(tag.json_schema)
        if isinstance(tag, Concatenation):
            last = len(tag.elements) - 1
            parts = [self.expression(part, is_last=is_last and i == last) for i, part in enumerate(tag.elements)]
            return " ".join(parts) or '""'
        if isinstance(tag, Alternatives):
            return _any_of([self.expression(part, is_last=is_last) for part in tag.elements])
        if isinstance(tag, Tag):
            return self._tag(tag, is_last=is_last)
        if isinstance(tag, TagsWithSeparator):
            return self._separated(tag)
        if not is_last:
            raise ValueError("any_text and triggered_tags must come last, and any_text may be all of a tag's content")
        return "TEXT" if isinstance(tag, AnyText) else self._triggered(tag)

    def _pieces(self, text: str) -> list[str]:
        """A text as strings and special tokens of Lark."""
        split = self._special.split(text) if self._special else [text]
        ids = self._special_ids
        return [f"<[{ids[piece]}]>" if piece in ids else _quoted(piece) for piece in split if piece]

    def _constant(self, text: str) -> str:
        return " ".join(self._pieces(text)) or '""'

    def _part(self, kind: str, value: Any) -> str:
        """A part with its own grammar."""
        source = self._source(kind, value)
        own = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
        name = f"part_{len(self.parts)}"
        self.parts.append({**own, "name": name})
        return f"@{name}"

    def _rule(self, body: str, options: str = "") -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _text_to(self, end: str) -> str:
        """Any text, and then `end`."""
        first, *rest = self._pieces(end)
        head = self._rule("TEXT", f"[suffix={first}]") if first.startswith('"') else f"TEXT {first}"
        return " ".join([head, *rest])

    def _tag(self, tag: Tag, *, is_last: bool, trigger: str = "") -> str:
        begin = self._pieces(tag.begin[len(trigger) :])
        if isinstance(tag.content, AnyText) and tag.end:
            return " ".join([*begin, self._text_to(tag.end)])
        content = self.expression(tag.content, is_last=is_last and not tag.end)
        return " ".join([*begin, content, *self._pieces(tag.end)])

    def _separated(self, tag: TagsWithSeparator) -> str:
        one = _any_of([self._tag(part, is_last=False) for part in tag.tags])
        if tag.stop_after_first or tag.at_most == 1:
            some = one
        else:
            more = "*" if tag.at_most is None else f"{{0,{tag.at_most - 1}}}"
            some = f"{one} ({self._constant(tag.separator)} {one}){more}"
        return f"({some})" if tag.at_least_one else f"({some})?"

    def _triggered(self, tag: TriggeredTags) -> str:
        for part in tag.tags:
            if not any(trigger and part.begin.startswith(trigger) for trigger in tag.triggers):
                raise ValueError(f"the tag {part.begin!r} begins with none of the triggers")
        from_text = []
        for trigger in tag.triggers:
            begun = [part for part in tag.tags if trigger and part.begin.startswith(trigger)]
            if begun:
                bodies = [self._tag(part, is_last=False, trigger=trigger) for part in begun]
                from_text.append(f"{self._text_to(trigger)} {_any_of(bodies)}")
        first = _any_of([self._tag(part, is_last=False) for part in tag.tags]) if tag.at_least_one else ""
        if tag.stop_after_first:
            return first or _any_of(["TEXT", *from_text])
        return f"{first} {_any_of(from_text)}* TEXT"

    def _parameters(self, schema: dict[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise ValueError("a schema's properties must be an object, and its required a list")
        parameters = []
        for key, part in properties.items():
            opening = _quoted(f"<parameter={key}>")
            types = json_types(part, schema)
            if types and "string" not in types:
                value = self._part("json_schema", part_of(schema, "properties", key))
                parameter = f'{opening} "\\n"? {value} "\\n"? "</parameter>"'
            elif types == {"string"} and isinstance(part.get("enum"), list):
                values = _any_of([_quoted(value) for value in part["enum"] if isinstance(value, str)])
                parameter = f'{opening} "\\n"? {values} "\\n"? "</parameter>"'
            else:
                parameter = f"{opening} {self._text_to('</parameter>')}"
            parameters.append(f'({parameter} "\\n"?)' + ("" if key in required else "?"))
        return " ".join(parameters) or '""'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # JSON's escapes are Lark's


def _any_of(expressions: Sequence[str]) -> str:
    if not expressions:
        raise ValueError("there must be at least one tag or element to choose from")
    return f"({' | '.join(expressions)})"
