# ruff: noqa: RUF001, RUF002 - the tags are spelt with full-width bars
"""DeepSeek's tagged calls. V3 and R1 write the arguments in a JSON code block, V3.1 writes them bare:

`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a code block of arguments, `<｜tool▁call▁end｜>`;
`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>`.
All calls lie between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.
"""

from __future__ import annotations

from ..text_scanner import Steps
from .call_format import CallFormat
from .parser import Outcome, ToolParser

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekV31Parser(ToolParser):
    """The format of V3.1."""

    markers = (_CALLS, _CALLS_END, _CALL, _SEPARATOR, _CALL_END)
    call_formats = (CallFormat(f"{_CALL}NAME{_SEPARATOR}", _CALL_END, "", _CALLS, _CALLS_END),)

    def _parse(self) -> Steps[None]:
        while (yield from self._text_until(_CALLS)) is not None:
            outcome = yield from self._call()
            if outcome is Outcome.NO_CALL:
                self._reject()
                continue
            while outcome is not Outcome.NO_CALL:
                if outcome is Outcome.BROKEN:
                    yield from self._raw_arguments(_CALL_END)
                    self._settle()
                outcome = yield from self._call()
            self._at = 0
            yield from self._close(_CALLS_END)

    def _call(self) -> Steps[Outcome]:
        yield from self._spaces()
        if not (yield from self._literal(_CALL)):
            return Outcome.NO_CALL
        name = self._named = yield from self._name()
        yield from self._spaces()
        if not name or (yield from self._peek()) != "{":
            return Outcome.NO_CALL
        self._start_call(name)
        if not (yield from self._json_arguments()):
            return Outcome.BROKEN
        yield from self._end()
        return Outcome.CALL

    def _name(self) -> Steps[str]:
        name = yield from self._read_until(_SEPARATOR)
        return (name or "").strip()

    def _end(self) -> Steps[None]:
        yield from self._close(_CALL_END)


class DeepSeekV3Parser(DeepSeekV31Parser):
    """The format of V3 and R1."""

    ends = ("```", *DeepSeekV31Parser.markers)
    call_formats = (
        CallFormat(f"{_CALL}function{_SEPARATOR}NAME\n```json\n", f"\n```{_CALL_END}", "\n", _CALLS, _CALLS_END),
    )

    def _name(self) -> Steps[str]:
        kind = yield from self._read_until(_SEPARATOR)
        if kind is None or kind.strip() != "function":
            return ""
        name = yield from self._read_until("```json")
        return (name or "").strip()

    def _end(self) -> Steps[None]:
        yield from self._close("```")
        yield from self._close(_CALL_END)
