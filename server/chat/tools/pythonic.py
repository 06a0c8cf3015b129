"""`[name(key=value, ...), ...]`: calls as a Python list, as the whole answer: Llama 3.2 and 4, ToolACE and others.

Each argument is given once it is whole, as its value has to be turned into JSON.
"""

from __future__ import annotations

import json
from typing import ClassVar

from ..text_scanner import Steps
from .call_format import CallFormat
from .notation import Notation
from .parser import Outcome, ToolParser
from .values import python_literal_to_json

_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_OTHERS = {"boolean": "True|False", "null": "None", "string": r"'(?:[^'\\]|\\[nrt'\"\\])*'"}
_ARGUMENTS = Notation("KEY=", separator=", ", quote=None, others=_OTHERS)


def _listed(opening: str, separator: str, closing: str) -> CallFormat:
    return CallFormat("NAME(", ")", separator, opening, closing, content=_ARGUMENTS.format)


class PythonicParser(ToolParser):
    """A list of calls is recognised at the beginning of an answer."""

    is_tagged = False
    call_formats: ClassVar[tuple[CallFormat, ...]] = (_listed("[", ", ", "]"),)
    brackets: ClassVar[bool] = True
    """Whether the calls are a list; else each stands on a line."""

    def _parse(self) -> Steps[None]:
        yield from self._calls()

    def _calls(self) -> Steps[None]:
        yield from self._spaces()
        outcome = Outcome.NO_CALL
        if not self.brackets or (yield from self._literal("[")):
            yield from self._spaces()
            outcome = yield from self._call()
        if outcome is Outcome.NO_CALL:
            self._reject()
        while outcome is Outcome.CALL:
            yield from self._spaces()
            if self.brackets and (yield from self._literal("]")):
                self._settle()
                return
            if self.brackets and not (yield from self._literal(",")):
                break
            yield from self._spaces()
            outcome = yield from self._call()
        if outcome is Outcome.BROKEN:
            yield from self._raw_arguments(*self.markers[1:])
            self._settle()
        self._at = 0

    def _call(self) -> Steps[Outcome]:
        name = yield from self._name()
        if not name or not (yield from self._literal("(")):
            return Outcome.NO_CALL
        self._named = name
        yield from self._spaces()
        if (yield from self._literal(")")):
            self._start_call(name)
            self._add_arguments("{}")
            return Outcome.CALL
        opening = "{"
        while True:
            argument = yield from self._argument()
            if argument is None:
                return Outcome.NO_CALL if opening == "{" else Outcome.BROKEN
            key, source = argument
            value = python_literal_to_json(source)
            if opening == "{":
                if value is None:
                    return Outcome.NO_CALL
                self._start_call(name)
            # A value that is no literal stays as it is. Then the arguments are not JSON, and no client runs the call.
            self._add_arguments(f"{opening}{json.dumps(key)}: {source if value is None else value}")
            self._settle()
            opening = ", "
            yield from self._spaces()
            if (yield from self._literal(",")):
                yield from self._spaces()
            elif (yield from self._peek()) != ")":
                return Outcome.BROKEN
            if (yield from self._literal(")")):
                self._add_arguments("}")
                self._settle()
                return Outcome.CALL

    def _name(self) -> Steps[str]:
        start = self._at
        while character := (yield from self._peek()):
            if not (character.isalpha() or character == "_") and (
                self._at == start or not (character.isalnum() or character in ".-")
            ):
                break
            self._at += 1
        return self._text[start : self._at]

    def _argument(self) -> Steps[tuple[str, str] | None]:
        """A keyword and its value's source; None if that is not what comes."""
        key = yield from self._name()
        yield from self._spaces()
        if not key or not (yield from self._literal("=")):
            return None
        yield from self._spaces()
        start = self._at
        if not (yield from self._skip_expression()):
            return None
        return key, self._text[start : self._at].rstrip()

    def _skip_expression(self) -> Steps[bool]:
        """Skips to the comma or bracket that ends a value; False if none does, or if brackets do not match."""
        closers: list[str] = []
        while character := (yield from self._peek()):
            if character in "'\"":
                if not (yield from self._skip_string(character)):
                    return False
                continue
            if character in _CLOSERS:
                closers.append(_CLOSERS[character])
            elif closers and character == closers[-1]:
                closers.pop()
            elif character in ")]}" or (character == "," and not closers):
                return not closers
            self._at += 1
        return False

    def _skip_string(self, quote: str) -> Steps[bool]:
        closing = quote * 3
        if not (yield from self._literal(closing)):
            closing = quote
            self._at += 1
        while not (yield from self._literal(closing)):
            if (yield from self._peek()) == "\\":
                self._at += 1
            if not (yield from self._peek()):
                return False
            self._at += 1
        return True


class TaggedPythonicParser(PythonicParser):
    """Formats whose lists of calls stand between two tags of `markers`."""

    is_tagged = True

    def _parse(self) -> Steps[None]:
        start, end = self.markers[:2]
        while (yield from self._text_until(start)) is not None:
            yield from self._calls()
            yield from self._close(end)


class Llama4PythonicParser(TaggedPythonicParser):
    """Llama 4 may write its list between two tags, and text before it; or the list is the whole answer."""

    markers = ("<|python_start|>", "<|python_end|>")
    call_formats = (_listed("<|python_start|>[", ", ", "]<|python_end|>"), *PythonicParser.call_formats)
    is_tagged = False

    def _parse(self) -> Steps[None]:
        start, end = self.markers
        yield from self._spaces()
        if not (yield from self._literal(start)):
            self._at = 0
            yield from self._calls()
            yield from self._close(end)
        self._at = 0
        yield from super()._parse()


class Lfm2Parser(TaggedPythonicParser):
    """LFM2 and LFM2.5."""

    markers = ("<|tool_call_start|>", "<|tool_call_end|>")
    call_formats = (_listed("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),)


class Olmo3Parser(TaggedPythonicParser):
    """OLMo 3: each call stands on a line, without brackets around them."""

    markers = ("<function_calls>", "</function_calls>")
    call_formats = (_listed("<function_calls>", "\n", "</function_calls>"),)
    brackets = False
