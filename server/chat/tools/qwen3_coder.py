"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.

Values are not JSON: what they are is for the tool's schema to say. Strings are given as they come, other values once
they are whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

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
_VALUE_ENDS = re.compile("|".join((_PARAMETER_END, _PARAMETER, _FUNCTION_END)))


class Qwen3CoderParser(ToolParser):
    """Models leave the outer tag out at times, so a call may begin with its function."""

    markers = (_OPEN, _CLOSE)
    ends = (_CLOSE,)
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
            if opening != "{" and (yield from self._literal(_PARAMETER_END)):  # models write it twice
                self._settle()
                continue
            key = (yield from self._tag_name()) if (yield from self._literal(_PARAMETER)) else None
            if key is None:
                self._at = 0
                is_whole = opening != "{" and (yield from self._ends_here())
                self._add_arguments("}" if is_whole else "")
                return is_whole
            self._settle()
            yield from self._literal("\n")
            types = parameter_types(self._tools, function, key)
            self._settle()
            start = f"{opening}{json.dumps(key, ensure_ascii=False)}: "
            if types <= {"string"} and types:
                self._add_arguments(start + '"')
                if not (yield from self._value(function, lambda text: self._add_arguments(_escaped(text)))):
                    return False
                self._add_arguments('"')
            else:
                parts: list[str] = []
                if not (yield from self._value(function, parts.append)):
                    self._add_arguments(start + "".join(parts))
                    return False
                self._add_arguments(start + _as_json("".join(parts), types))
            opening = ", "

    def _value(self, function: str, give: Callable[[str], object]) -> Steps[bool]:
        """Gives a value's text, up to its end; False if that never comes.

        Models forget `</parameter>` at times. Then the value ends before the next parameter, or with the function. But
        a value may contain such tags. So a parameter's tag has to begin a line or to name one of the function's, and
        behind a function's end there has to be what follows a call.
        """
        tags = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)
        begins_line = True  # where the unsettled text begins
        while True:
            found = _VALUE_ENDS.search(self._text, self._at)
            if found is None:
                held = max(_overlap(self._text, start + tag) for tag in tags for start in ("", "\n"))
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
            if tag == _PARAMETER:
                key = yield from self._tag_name()
                is_line = before.endswith("\n") or (begins_line and not before)
                is_end = key is not None and (is_line or bool(parameter_types(self._tools, function, key)))
            else:
                is_end = tag == _PARAMETER_END or (yield from self._ends_call())
            if is_end:
                give(before.removesuffix("\n"))
                self._settle(found.end() if tag == _PARAMETER_END else found.start())
                return True
            self._at = found.end()

    def _ends_call(self) -> Steps[bool]:
        """Whether something comes that follows a call, or nothing at all."""
        yield from self._spaces()
        if not (yield from self._peek()):
            return not self._cut_off
        for following in (_CLOSE, _OPEN, _FUNCTION):
            if (yield from self._literal(following)):
                return True
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
