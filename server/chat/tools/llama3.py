"""`{"name": ..., "parameters": {...}}` as the whole answer: Llama 3.1, 3.2, 3.3 and 4.

Several calls are joined by `;`, or stand on lines of their own.
"""

from __future__ import annotations

from ..text_scanner import Steps
from .call_format import CallFormat
from .parser import Outcome, ToolParser

_TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """A call is recognised at the beginning of an answer, and after `<|python_tag|>` anywhere."""

    markers = (_TAG,)
    is_tagged = False
    call_formats = tuple(CallFormat(separator="; ", opening=opening, key="parameters") for opening in ("", _TAG))

    def _parse(self) -> Steps[None]:
        yield from self._spaces()
        if not (yield from self._literal(_TAG)):
            yield from self._calls()
        else:
            self._at = 0
        while (yield from self._text_until(_TAG)) is not None:
            yield from self._calls()

    def _calls(self) -> Steps[None]:
        yield from self._spaces()
        outcome = yield from self._json_call(is_marked=False)
        if outcome is Outcome.NO_CALL:
            self._reject()
        while outcome is Outcome.CALL:
            yield from self._skip_surplus("}")
            yield from self._spaces()
            yield from self._literal(";")
            yield from self._spaces()
            outcome = yield from self._json_call(is_marked=False)
        if outcome is Outcome.BROKEN:
            yield from self._raw_arguments()
        self._at = 0
