"""Calls whose arguments stand between tags, one for each parameter. Models differ in the tags, as a Shape says.

Values are not JSON: what they are is for the tool's schema to say, and for DeepSeek's attribute `string`. Strings are
given as they come, other values once they are whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from ..text_scanner import Steps
from .json_scanner import mended_json
from .parser import ToolParser
from .schema import parameter_types
from .values import escaped, typed_json

_QUOTED_NAME = re.compile(r"""(["']?)(?P<name>[^"']+)\1\s*(?:string\s*=\s*["']?(?P<string>true|false)["']?)?\s*""")
_LONGEST_NAME = 256  # characters


class Shape(NamedTuple):
    """A format's tags. Those of a function and of a parameter end before the name.

    Without `function` a call begins with its name; without `opening` nothing is around it. `lead` stands between the
    two. All calls may lie in a section; models leave out its tags at times. Where values are `on_lines`, the line
    breaks around them are not part of them.
    """

    opening: str
    closing: str
    function: str
    function_end: str
    parameter: str
    parameter_end: str
    on_lines: bool = False
    section: str = ""
    section_end: str = ""
    lead: str = ""


class XmlParser(ToolParser):
    """Models leave the outer tag out at times, so a call may begin with its function."""

    shape: ClassVar[Shape]

    def __init_subclass__(cls) -> None:
        shape = cls.shape
        cls.ends = (shape.closing or shape.section_end or shape.function,)
        cls._value_tags = (shape.parameter_end, shape.parameter, shape.function_end)
        cls._value_ends = re.compile("|".join(map(re.escape, cls._value_tags)))

    _value_tags: ClassVar[tuple[str, ...]]
    _value_ends: ClassVar[re.Pattern[str]]

    def _parse(self) -> Steps[None]:
        shape = self.shape
        while tag := (yield from self._text_until(*filter(None, (shape.section, shape.opening, shape.function)))):
            if tag == shape.section:
                yield from self._spaces()
                tag = shape.opening if (yield from self._literal(shape.opening)) else tag
            if tag == shape.opening:
                yield from self._spaces()
                yield from self._literal(shape.lead)
                yield from self._spaces()
            name = None
            if tag == shape.function or (yield from self._literal(shape.function)):
                name = yield from self._function_name()
            if name is None:
                self._reject()
                continue
            self._start_call(name)
            if not (yield from self._parameters(name)):
                yield from self._raw_arguments(shape.function_end)
                self._settle()
            if shape.closing not in ("", shape.function_end):
                yield from self._close(shape.closing)
            if shape.section_end:
                yield from self._close(shape.section_end)

    def _function_name(self) -> Steps[str | None]:
        named = yield from self._key()
        return None if named is None else named[0]

    def _key(self) -> Steps[tuple[str, str | None] | None]:
        """A parameter's name, and the attribute `string`; None if its tag is not closed on its line."""
        named = _QUOTED_NAME.fullmatch((yield from self._name_text()))
        return (named["name"].strip(), named["string"]) if named and (yield from self._literal(">")) else None

    def _name_text(self) -> Steps[str]:
        """What stands on the line before the next tag's begin or end."""
        start = self._at
        while (character := (yield from self._peek())) and character not in "<>\n" and self._at - start < _LONGEST_NAME:
            self._at += 1
        return self._text[start : self._at].strip()

    def _parameters(self, function: str) -> Steps[bool]:
        """Gives the parameters of an open call; False if something else stands between them."""
        shape, opening = self.shape, "{"
        while True:
            yield from self._spaces()
            if (yield from self._literal(shape.function_end)):
                self._add_arguments("{}" if opening == "{" else "}")
                self._settle()
                return True
            if opening != "{" and (yield from self._literal(shape.parameter_end)):  # models write it twice
                self._settle()
                continue
            named = (yield from self._key()) if (yield from self._literal(shape.parameter)) else None
            if named is None:
                self._at = 0
                is_whole = opening != "{" and (yield from self._ends_here())
                self._add_arguments("}" if is_whole else "")
                return is_whole
            key, string = named
            self._settle()
            if shape.on_lines:
                yield from self._literal("\n")
                self._settle()
            types = {"string"} if string == "true" else parameter_types(self._tools, function, key)
            start = f"{opening}{json.dumps(key, ensure_ascii=False)}: "
            if types == {"string"} and string != "false":
                self._add_arguments(start + '"')
                if not (yield from self._value(function, lambda text: self._add_arguments(escaped(text)))):
                    return False
                self._add_arguments('"')
            else:
                parts: list[str] = []
                if not (yield from self._value(function, parts.append)):
                    self._add_arguments(start + "".join(parts))
                    return False
                value = "".join(parts)
                mended = mended_json(value) if string == "false" else None
                self._add_arguments(start + (mended or typed_json(value, types)))
            opening = ", "

    def _value(self, function: str, give: Callable[[str], object]) -> Steps[bool]:
        """Gives a value's text, up to its end; False if that never comes.

        Models forget the tag that ends a value at times. Then it ends before the next parameter, or with the function.
        But a value may contain such tags. So a parameter's tag has to begin a line or to name one of the function's,
        and behind a function's end there has to be what follows a call.
        """
        shape = self.shape
        begins_line = True  # where the unsettled text begins
        while True:
            found = self._value_ends.search(self._text, self._at)
            if found is None:
                held = max(_overlap(self._text, start + tag) for tag in self._value_tags for start in ("", "\n"))
                certain = max(self._at, len(self._text) - held)
                give(self._text[:certain])
                begins_line = begins_line and not certain
                self._settle(certain)
                if not (yield from self._more()):
                    give(self._text)
                    self._settle(len(self._text))
                    return False
                continue
            before, tag = self._text[: found.start()], found[0]
            self._at = found.end()
            if tag == shape.parameter:
                named = yield from self._key()
                is_line = before.endswith("\n") or (begins_line and not before)
                is_end = named is not None and (is_line or bool(parameter_types(self._tools, function, named[0])))
            else:
                is_end = tag == shape.parameter_end or (yield from self._ends_call())
            if is_end:
                is_closed = tag == shape.parameter_end
                give(before.removesuffix("\n") if shape.on_lines or not is_closed else before)
                self._settle(found.end() if is_closed else found.start())
                return True
            self._at = found.end()

    def _ends_call(self) -> Steps[bool]:
        """Whether something comes that follows a call, or nothing at all."""
        yield from self._spaces()
        if not (yield from self._peek()):
            return not self._cut_off
        shape = self.shape
        for following in filter(None, (shape.closing, shape.section_end, shape.opening, shape.function)):
            if (yield from self._literal(following)):
                return True
        return False


def _overlap(text: str, tag: str) -> int:
    """How many of the last characters are the beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
