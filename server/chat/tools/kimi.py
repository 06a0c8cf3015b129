"""Kimi K2's tagged calls, `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

What stands before the arguments is the call's id, which the model's template wants back unchanged. All calls lie
between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`, which the model leaves out at times.
"""

from __future__ import annotations

import re

from tidewheel.engine.constraints.structural_tag import JsonSchema

from ..text_scanner import Steps
from .call_format import CallFormat, numbered
from .parser import ToolParser

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(?P<name>[\w./-]+?)(?::\d+)?")
_LONGEST_ID = 256  # characters


class KimiK2Parser(ToolParser):
    """See the module."""

    markers = (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END)
    call_formats = (
        CallFormat(
            f"{_CALL}functions.NAME:",
            _CALL_END,
            opening=_SECTION,
            closing=_SECTION_END,
            content=numbered(_ARGUMENTS, JsonSchema),
        ),
    )

    def _parse(self) -> Steps[None]:
        while tag := (yield from self._text_until(_SECTION, _CALL)):
            if tag == _SECTION:
                yield from self._spaces()
            named = None
            if tag == _CALL or (yield from self._literal(_CALL)):
                named = yield from self._id()
            if named is None:
                self._reject()
                continue
            self._open_call(*named)
            if not (yield from self._json_arguments()):
                yield from self._raw_arguments(_CALL_END)
                self._settle()
            else:
                yield from self._skip_surplus("}")
                yield from self._close(_CALL_END)
            yield from self._close(_SECTION_END)

    def _id(self) -> Steps[tuple[str, str] | None]:
        """A call's id and name, before its arguments; None if these do not come."""
        yield from self._spaces()
        start = self._at
        while (character := (yield from self._peek())) and character not in "<\n{" and self._at - start < _LONGEST_ID:
            self._at += 1
        call_id = self._text[start : self._at].strip()
        named = _ID.fullmatch(call_id)
        if named is None:
            return None
        self._named = named["name"]
        yield from self._spaces()
        if not (yield from self._literal(_ARGUMENTS)):
            return None
        yield from self._spaces()
        return (call_id, named["name"]) if (yield from self._peek()) == "{" else None
