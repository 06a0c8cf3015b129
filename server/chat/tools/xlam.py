"""`[{"name": ..., "arguments": {...}}, ...]`: xLAM. The list is the answer, or in a code block, or behind a tag."""

from __future__ import annotations

from ..text_scanner import Steps
from .call_format import CallFormat
from .parser import Outcome, ToolParser

_TAGS = ("[TOOL_CALLS]", "<tool_call>")
_FENCES = ("```json", "```")


class XlamParser(ToolParser):
    """A list without a tag is recognised at the beginning of an answer."""

    markers = (*_TAGS, "</tool_call>")
    ends = ("</tool_call>", "```")
    is_tagged = False
    call_formats = (CallFormat(separator=", ", opening="[", closing="]", key="arguments"),)

    def _parse(self) -> Steps[None]:
        yield from self._spaces()
        for fence in _FENCES:
            if (yield from self._literal(fence)):
                break
        yield from self._spaces()
        if (yield from self._peek()) == "[" and not (yield from self._comes_tag()):
            yield from self._list(is_marked=False)
        else:
            self._at = 0
        while (yield from self._text_until(*_TAGS)) is not None:
            yield from self._list(is_marked=True)

    def _comes_tag(self) -> Steps[bool]:
        before = self._at
        found = yield from self._literal(_TAGS[0])
        self._at = before
        return found

    def _list(self, *, is_marked: bool) -> Steps[None]:
        outcome = yield from self._json_calls(is_marked=is_marked)
        if outcome is Outcome.NO_CALL:
            self._reject()
        elif outcome is Outcome.BROKEN:
            yield from self._raw_arguments("</tool_call>")
            self._settle()
        else:
            for closing in ("```", "</tool_call>"):
                yield from self._close(closing)
