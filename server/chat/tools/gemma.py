"""Gemma's calls, `<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:4,KEY:[]}<tool_call|>`: an object without JSON's quotes.

Values are read token by token, so that no nesting exhausts a stack, and given as they come. Models leave out the
delimiter before a text, write plain quotes, or `(...)` for the outermost braces.
"""

from __future__ import annotations

import json
from typing import ClassVar

from ..text_scanner import Steps
from .call_format import CallFormat
from .json_scanner import is_json, mended_json
from .notation import Nesting, Notation
from .parser import ToolParser
from .schema import parameter_types

_KEY_ENDS, _VALUE_ENDS = ",:{}[]()", ",]})"
_PAIRS = {"{": "}", "[": "]", "(": ")"}
_LONGEST_NAME = 256  # characters


def _formats(opening: str, closing: str, delimiter: str) -> tuple[CallFormat, ...]:
    arguments = Notation("KEY:", separator=",", quote=delimiter, nesting=Nesting(("{", "}"), ("[", "]")))
    return (CallFormat(f"{opening}call:NAME{{", f"}}{closing}", content=arguments.format),)


class Gemma4Parser(ToolParser):
    """Gemma 4."""

    markers = ("<|tool_call>", "<tool_call|>", '<|"|>')
    delimiter: ClassVar[str] = '<|"|>'
    call_formats = _formats(*markers)

    def _parse(self) -> Steps[None]:
        opening, closing = self.markers[:2]
        while (yield from self._text_until(opening)) is not None:
            yield from self._spaces()
            yield from self._literal("call:")
            name = self._named = yield from self._name()
            opener = yield from self._peek()
            if not name or opener not in ("{", "("):
                self._reject()
                continue
            self._at += 1
            self._start_call(name)
            self._add_arguments("{")
            if not (yield from self._object(name, opener)):
                yield from self._raw_arguments(closing)
                self._settle()
            else:
                yield from self._close(closing)

    def _name(self) -> Steps[str]:
        start = self._at
        while (character := (yield from self._peek())) and self._at - start < _LONGEST_NAME:
            if not (character.isalnum() or character in "_.-/:"):
                break
            self._at += 1
        return self._text[start : self._at]

    def _object(self, function: str, opener: str) -> Steps[bool]:
        """Gives the arguments after their opening brace as JSON; False if they are not what the format asks for."""
        open_ones, key, after_value = [opener], "", False
        needs_comma = False
        while open_ones:
            yield from self._spaces()
            character = yield from self._peek()
            if not character or (yield from self._is_closing()):
                if self._cut_off or not after_value:
                    return False
                self._add_arguments("".join("]" if one == "[" else "}" for one in reversed(open_ones)))
                return True
            if character == _PAIRS[open_ones[-1]]:
                self._at += 1
                self._give("]" if open_ones.pop() == "[" else "}")
                after_value = needs_comma = True
                continue
            if character == ",":
                self._at += 1
                self._settle()
                after_value, needs_comma = False, True
                continue
            before = ", " if needs_comma else ""
            if open_ones[-1] != "[":
                key = yield from self._key()
                if not key:
                    return False
                before += json.dumps(key, ensure_ascii=False) + ": "
                yield from self._spaces()
                character = yield from self._peek()
            if character in ("{", "["):
                self._at += 1
                self._give(before + character)
                open_ones.append(character)
                after_value = needs_comma = False
                continue
            types = parameter_types(self._tools, function, key) if len(open_ones) == 1 else set[str]()
            value = yield from self._value(types)
            if value is None:
                return False
            self._give(before + value)
            after_value = needs_comma = True
        return True

    def _give(self, text: str) -> None:
        self._add_arguments(text)
        self._settle()

    def _is_closing(self) -> Steps[bool]:
        return (yield from self._comes(self.markers[1]))

    def _comes(self, tag: str) -> Steps[bool]:
        before = self._at
        found = yield from self._literal(tag)
        self._at = before
        return found

    def _key(self) -> Steps[str]:
        """A key and the colon after it; empty if that is not what comes."""
        if (yield from self._peek()) == '"':
            key = (yield from self._json_string()) or ""
            yield from self._spaces()
        else:
            yield from self._literal(self.delimiter)
            key = (yield from self._bare(_KEY_ENDS)).strip().strip("\"'")
            yield from self._literal(self.delimiter)
        return key if (yield from self._literal(":")) else ""

    def _bare(self, ends: str) -> Steps[str]:
        """The text before the next of these characters, or the next tag."""
        start = self._at
        while (character := (yield from self._peek())) and character not in ends:
            if character == "<" and ((yield from self._comes(self.delimiter)) or (yield from self._is_closing())):
                break
            self._at += 1
        return self._text[start : self._at]

    def _value(self, types: set[str]) -> Steps[str | None]:
        """A value that is no list or object, as JSON; None if it breaks off."""
        if (yield from self._literal(self.delimiter)):
            text = yield from self._read_until(self.delimiter)
            return None if text is None else json.dumps(text, ensure_ascii=False)
        if (yield from self._peek()) == '"':
            return (yield from self._json_value())
        text = (yield from self._bare(_VALUE_ENDS)).strip()
        if (yield from self._literal(self.delimiter)):  # whose beginning was left out
            return json.dumps(text, ensure_ascii=False)
        if types == {"string"} or not is_json(text):
            return (types != {"string"} and mended_json(text)) or json.dumps(text, ensure_ascii=False)
        return text


class FunctionGemmaParser(Gemma4Parser):
    """FunctionGemma."""

    markers = ("<start_function_call>", "<end_function_call>", "<escape>")
    delimiter = "<escape>"
    call_formats = _formats(*markers)
