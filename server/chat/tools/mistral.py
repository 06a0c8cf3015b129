"""`[TOOL_CALLS]`, then a list of JSON calls in older models; in newer ones a name, `[ARGS]` and the arguments."""

from __future__ import annotations

import random
import re
import string

from ..text_scanner import Steps
from .call_format import CallFormat
from .parser import Outcome, ToolParser

_TAG, _ID_TAG, _ARGUMENTS_TAG = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.:/-]+")
_CHARACTERS = string.ascii_letters + string.digits


class MistralParser(ToolParser):
    """Both formats. Ids are nine letters and digits, as Mistral's templates demand."""

    markers = (_TAG, _ID_TAG, _ARGUMENTS_TAG)
    call_formats = (
        CallFormat(separator=", ", opening=f"{_TAG}[", closing="]", key="arguments"),
        CallFormat(separator=", ", opening=f"{_TAG} [", closing="]", key="arguments"),
        CallFormat(f"{_TAG}NAME{_ARGUMENTS_TAG}"),
    )

    @staticmethod
    def new_id() -> str:
        """See ToolParser."""
        return "".join(random.choices(_CHARACTERS, k=9))

    def _parse(self) -> Steps[None]:
        tag = yield from self._text_until(_TAG)
        while tag is not None:
            yield from self._spaces()
            if (yield from self._peek()) in ("[", "{"):
                outcome = yield from self._json_calls()
            else:
                outcome = yield from self._named_call()
            if outcome is Outcome.BROKEN:
                tag = yield from self._raw_arguments(_TAG)  # the next call's
                continue
            if outcome is Outcome.NO_CALL:
                self._reject()
            tag = yield from self._text_until(_TAG)

    def _named_call(self) -> Steps[Outcome]:
        name = self._named = yield from self._word()
        call_id = self._new_id()
        if (yield from self._literal(_ID_TAG)):
            call_id = yield from self._word()
        yield from self._literal(_ARGUMENTS_TAG)
        yield from self._spaces()
        if not name or not call_id or (yield from self._peek()) != "{":
            return Outcome.NO_CALL
        self._open_call(call_id, name)
        return Outcome.CALL if (yield from self._json_arguments()) else Outcome.BROKEN

    def _word(self) -> Steps[str]:
        start = self._at
        while (character := (yield from self._peek())) and _NAME.fullmatch(character):
            self._at += 1
        return self._text[start : self._at]
