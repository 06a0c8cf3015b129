"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.

Values are not JSON: what they are is for the tool's schema to say. Strings are given as they come, other values once
they are whole.
"""

from __future__ import annotations

import json

from tidewheel.engine.constraints.structural_tag import QwenXmlParameter

from ..text_scanner import Steps
from .call_format import CallFormat
from .json_scanner import is_json
from .parser import ToolParser
from .schema import parameter_types
from .values import python_literal_to_json

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderParser(ToolParser):
    """Models leave the outer tag out at times, so a call may begin with its function."""

    markers = (_OPEN, _CLOSE)
    call_formats = (
        CallFormat(f"{_OPEN}\n{_FUNCTION}NAME>\n", f"{_FUNCTION_END}\n{_CLOSE}", "\n", content=QwenXmlParameter),
    )

    def _parse(self) -> Steps[None]:
        while tag := (yield from self._text_until(_OPEN, _FUNCTION)):
            if tag == _OPEN:
                yield from self._spaces()
            name = None
            if tag == _FUNCTION or (yield from self._literal(_FUNCTION)):
                name = yield from self._tag_name()
            if name is None:
                self._reject()
                continue
            self._start_call(name)
            if not (yield from self._parameters(name)):
                yield from self._raw_arguments(_FUNCTION_END)
                self._settle()
            yield from self._close(_CLOSE)

    def _tag_name(self) -> Steps[str | None]:
        """What stands before the tag's `>`, on one line; None if it is not closed so."""
        start = self._at
        while (character := (yield from self._peek())) and character not in "<>\n":
            self._at += 1
        name = self._text[start : self._at].strip()
        return name if name and (yield from self._literal(">")) else None

    def _parameters(self, function: str) -> Steps[bool]:
        """Gives the parameters of an open call; False if something else stands between them."""
        opening = "{"
        while True:
            yield from self._spaces()
            if (yield from self._literal(_FUNCTION_END)):
                self._add_arguments("{}" if opening == "{" else "}")
                self._settle()
                return True
            key = (yield from self._tag_name()) if (yield from self._literal(_PARAMETER)) else None
            if key is None:
                self._at = 0
                return False
            self._settle()
            yield from self._literal("\n")
            types = parameter_types(self._tools, function, key)
            self._settle()
            start = f"{opening}{json.dumps(key, ensure_ascii=False)}: "
            if types <= {"string"} and types:
                self._add_arguments(start + '"')
                if not (yield from self._string_value()):
                    return False
                self._add_arguments('"')
            else:
                value = yield from self._read_until(_PARAMETER_END)
                if value is None:
                    self._add_arguments(start)
                    self._at = 0
                    return False
                self._add_arguments(start + _as_json(value.removesuffix("\n"), types))
                self._settle()
            opening = ", "

    def _string_value(self) -> Steps[bool]:
        """Gives a string's text up to its closing tag; False if that never comes."""
        closing = "\n" + _PARAMETER_END
        while True:
            end = self._text.find(_PARAMETER_END)
            if end >= 0:
                self._add_arguments(_escaped(self._text[:end].removesuffix("\n")))
                self._settle(end + len(_PARAMETER_END))
                return True
            held = max(_overlap(self._text, closing), _overlap(self._text, _PARAMETER_END))
            self._add_arguments(_escaped(self._text[: len(self._text) - held]))
            self._settle(len(self._text) - held)
            if not (yield from self._more()):
                self._add_arguments(_escaped(self._text))
                self._settle(len(self._text))
                return False


def _as_json(value: str, types: set[str]) -> str:
    """A value's text as JSON of one of `types`, as far as it can be read so, else as a string."""
    stripped = value.strip()
    literal = stripped if is_json(stripped) else python_literal_to_json(stripped)
    if "string" in types or not types:
        # Any text is a string; what else it may be has to be unmistakable.
        takes_null = "null" in types and literal == "null"
        return "null" if takes_null else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if literal is None else literal


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _overlap(text: str, tag: str) -> int:
    """How many of the last characters are the beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
