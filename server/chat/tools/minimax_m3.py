"""MiniMax M3's calls: elements within each other. Each tag has the same mark before it:

`<tool_call><invoke name="NAME"><KEY>VALUE</KEY><LIST><item>VALUE</item></LIST></invoke></tool_call>`

The mark is one special token, so a value may have any other text. What a value is, the tool's schema says.
"""

from __future__ import annotations

import json

from ..text_scanner import Steps
from .call_format import CallFormat
from .notation import Nesting, Notation
from .parser import ToolParser
from .schema import Part, parameters_of
from .values import escaped, typed_json

_MARK = "]<]minimax[>["
_CALLS, _CALLS_END, _INVOKE = f"{_MARK}<tool_call>", f"{_MARK}</tool_call>", f"{_MARK}<invoke name="
_BARE_CALLS = "<tool_call>"  # the mark is left out at times
_ITEM = "item"
_LONGEST_NAME = 256  # characters
_DEEPEST = 64  # elements; tags of those that lie deeper are left out


class _Element:
    """An open element. It is a value until another one is opened in it: then it has a `bracket`."""

    def __init__(self, tag: str, part: Part, bracket: str = "") -> None:
        self.tag = tag
        self.part = part
        self.bracket = bracket
        self.types = part.types()
        self.is_text = self.types == {"string"}

    def closing(self, value: str) -> str:
        """The JSON that ends it. `value` is its text, unless that was given already."""
        if self.bracket:
            return "]" if self.bracket == "[" else "}"
        return '"' if self.is_text else typed_json(value, self.types)


class MiniMaxM3Parser(ToolParser):
    """See the module."""

    markers = (_MARK,)
    ends = (_MARK,)
    call_formats = (
        CallFormat(
            f'{_INVOKE}"NAME">',
            f"{_MARK}</invoke>\n",
            "",
            f"{_CALLS}\n",
            _CALLS_END,
            content=Notation(
                f"{_MARK}<KEY>", f"{_MARK}</KEY>", nesting=Nesting(element=(f"{_MARK}<item>", f"{_MARK}</item>"))
            ).format,
        ),
    )

    def _parse(self) -> Steps[None]:
        while tag := (yield from self._text_until(_CALLS, _INVOKE, _BARE_CALLS)):
            if tag != _INVOKE:
                yield from self._spaces()
            name = ""
            if tag == _INVOKE or (yield from self._literal(_INVOKE)):
                name = self._named = (yield from self._name()).strip("\"' ")
            if not name or not (yield from self._literal(">")):
                self._reject()
                continue
            self._start_call(name)
            self._add_arguments("{")
            yield from self._elements([_Element("", parameters_of(self._tools, name), "{")])
            yield from self._close(_CALLS_END)

    def _name(self) -> Steps[str]:
        start = self._at
        while (character := (yield from self._peek())) and character not in "<>\n" and self._at - start < _LONGEST_NAME:
            self._at += 1
        return self._text[start : self._at]

    def _elements(self, opened: list[_Element]) -> Steps[None]:
        """Gives a call's elements as JSON, up to its end. An end tag ends all that is open within its element."""
        needs_comma = False
        while opened:
            value = yield from self._value(given=opened[-1].is_text and not opened[-1].bracket)
            if not (yield from self._peek()) and self._cut_off:
                return
            is_start, tag = yield from self._tag()
            if is_start and tag and tag != "invoke":
                if len(opened) == _DEEPEST:
                    self._settle()
                    continue
                if opened[-1].is_text and not opened[-1].bracket:  # whose end was left out
                    self._add_arguments(opened.pop().closing(value))
                    needs_comma = True
                parent = opened[-1]
                if not parent.bracket:
                    parent.bracket = "[" if tag == _ITEM and parent.types != {"object"} else "{"
                    self._add_arguments(parent.bracket)
                    needs_comma = False
                key = "" if parent.bracket == "[" else json.dumps(tag, ensure_ascii=False) + ": "
                child = _Element(tag, parent.part.element() if parent.bracket == "[" else parent.part.member(tag))
                self._add_arguments((", " if needs_comma else "") + key + ('"' if child.is_text else ""))
                opened.append(child)
                needs_comma = False
            else:
                is_over = is_start or tag in ("", "invoke")
                if is_over or any(element.tag == tag for element in opened):
                    while opened and (is_over or opened[-1].tag != tag):
                        self._add_arguments(opened.pop().closing(value))
                        value = ""
                    if opened:
                        self._add_arguments(opened.pop().closing(value))
                    needs_comma = True
                if is_over and tag != "invoke":
                    self._at = 0
            self._settle(self._at)

    def _value(self, *, given: bool) -> Steps[str]:
        """The text before the next mark. It is passed on as it comes if it is to be `given`."""
        parts: list[str] = []
        while True:
            place = self._text.find(_MARK)
            certain = len(self._text) - self._begun_tag((_MARK,)) if place < 0 else place
            if place < 0 and self._ended and not self._cut_off:
                certain = len(self._text)
            if given:
                self._add_arguments(escaped(self._text[:certain]))
            else:
                parts.append(self._text[:certain])
            self._settle(certain)
            if place >= 0:
                break
            if not (yield from self._more()):
                self._settle(len(self._text))
                break
        return "".join(parts)

    def _tag(self) -> Steps[tuple[bool, str]]:
        """Reads a tag with its mark: whether it begins an element, and which. No name if it is no element's."""
        yield from self._literal(_MARK)
        is_start = not (yield from self._literal("</"))
        if is_start and not (yield from self._literal("<")):
            return False, ""
        name = yield from self._name()
        if not (yield from self._literal(">")) or name == "tool_call":
            return False, ""
        return is_start, name
