"""Calls with ids, which the model's template wants back unchanged. Kimi K2 has the name in it:

`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`

All calls lie between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`, which the model leaves out at
times. Solar Open has other tags, and one between id and name.
"""

from __future__ import annotations

import re
from typing import ClassVar

from tidewheel.engine.constraints.structural_tag import JsonSchema

from ..text_scanner import Steps
from .call_format import CallFormat, numbered
from .parser import ToolParser

_ID = re.compile(r"(?:functions\.)?(?P<name>[\w./-]+?)(?::\d+)?")
_NAME = re.compile(r"[\w./-]+")
_LONGEST_ID = 256  # characters


class KimiK2Parser(ToolParser):
    """Kimi K2."""

    section: ClassVar[str] = "<|tool_calls_section_begin|>"
    section_end: ClassVar[str] = "<|tool_calls_section_end|>"
    call: ClassVar[str] = "<|tool_call_begin|>"
    arguments: ClassVar[str] = "<|tool_call_argument_begin|>"
    call_end: ClassVar[str] = "<|tool_call_end|>"
    markers: ClassVar[tuple[str, ...]] = (section, section_end, call, arguments, call_end)
    call_formats: ClassVar[tuple[CallFormat, ...]] = (
        CallFormat(
            f"{call}functions.NAME:", call_end, "", section, section_end, content=numbered(arguments, JsonSchema)
        ),
    )

    def _parse(self) -> Steps[None]:
        while tag := (yield from self._text_until(self.section, self.call)):
            if tag == self.section:
                yield from self._spaces()
            named = None
            if tag == self.call or (yield from self._literal(self.call)):
                named = yield from self._id()
            if named is None:
                self._reject()
                continue
            self._open_call(*named)
            if not (yield from self._json_arguments()):
                yield from self._raw_arguments(self.call_end)
                self._settle()
            else:
                yield from self._skip_surplus("}")
                yield from self._close(self.call_end)
            if self.section_end:
                yield from self._close(self.section_end)

    def _id(self) -> Steps[tuple[str, str] | None]:
        """A call's id and name, before its arguments; None if these do not come."""
        call_id = yield from self._word()
        named = _ID.fullmatch(call_id)
        if named is None:
            return None
        self._named = named["name"]
        return (call_id, named["name"]) if (yield from self._comes_object()) else None

    def _word(self) -> Steps[str]:
        yield from self._spaces()
        start = self._at
        while (character := (yield from self._peek())) and character not in "<\n{" and self._at - start < _LONGEST_ID:
            self._at += 1
        return self._text[start : self._at].strip()

    def _comes_object(self) -> Steps[bool]:
        yield from self._spaces()
        if not (yield from self._literal(self.arguments)):
            return False
        yield from self._spaces()
        return (yield from self._peek()) == "{"


class SolarOpenParser(KimiK2Parser):
    """Solar Open."""

    section, section_end = "<|tool_calls|>", ""
    call, arguments, call_end = "<|tool_call:begin|>", "<|tool_call:args|>", "<|tool_call:end|>"
    name: ClassVar[str] = "<|tool_call:name|>"
    markers = (section, call, name, arguments, call_end)
    call_formats = (
        CallFormat(f"{name}NAME{arguments}", call_end, "", section, before_id=call),
        CallFormat(f"{name}NAME{arguments}", call_end, "", f"<|begin|>assistant{section}", before_id=call),
    )

    def _id(self) -> Steps[tuple[str, str] | None]:
        call_id = yield from self._word()
        if not call_id or not (yield from self._literal(self.name)):
            return None
        name = self._named = yield from self._word()
        return (call_id, name) if _NAME.fullmatch(name) and (yield from self._comes_object()) else None
