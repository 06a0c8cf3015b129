"""JSON that arrives in pieces: where a value ends, and where it stops being JSON (RFC 8259)."""

from __future__ import annotations

import re
from collections.abc import Callable

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING_BODY = re.compile(r'[^"\\\x00-\x1f]*')
_WORD_BODY = re.compile(r"[-+.0-9A-Za-z]*")
_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_WORD_START = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][-+]?[0-9]*)?)?")
_NAMES = ("true", "false", "null")
_CLOSERS = {"{": "}", "[": "]"}


class JsonScanner:
    """Follows one value to its end. `is_done` and `is_broken` tell how it went."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._open: list[str] = []
        self._word = ""
        self._hex_digits = 0
        self._is_key = False
        self._state: Callable[[str, int], int] = self._value

    def scan(self, text: str, at: int) -> int:
        """Goes on with `text` from `at`. Returns where the value, or what is JSON of it, ends."""
        while at < len(text) and not self.is_done and not self.is_broken:
            at = self._state(text, at)
        return at

    def finish(self) -> bool:
        """Whether the value is complete if no more text comes. Only a number or a word may end so."""
        if not self.is_done and not self._open and self._word and not self.is_broken:
            self.is_done = _WORD.fullmatch(self._word) is not None
        return self.is_done

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at

    def _value(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if at == len(text):
            return at
        character = text[at]
        if character in "{[":
            self._open.append(character)
            self._state = self._first_key if character == "{" else self._first_item
            return at + 1
        if character == '"':
            self._is_key, self._state = False, self._string
            return at + 1
        if character in "-0123456789tfn":
            self._word, self._state = "", self._in_word
            return at
        return self._break(at)

    def _first_item(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if text[at : at + 1] == "]":
            return self._close(at)
        if at < len(text):
            self._state = self._value
        return at

    def _first_key(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if text[at : at + 1] == "}":
            return self._close(at)
        if at < len(text):
            self._state = self._key
        return at

    def _key(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != '"':
            return self._break(at)
        self._is_key, self._state = True, self._string
        return at + 1

    def _string(self, text: str, at: int) -> int:
        at = _end_of(_STRING_BODY, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._state = self._escape
            return at + 1
        if text[at] != '"':
            return self._break(at)
        if self._is_key:
            self._state = self._colon
        else:
            self._end_value()
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._hex_digits, self._state = 4, self._in_hex
        elif text[at] in '"\\/bfnrt':
            self._state = self._string
        else:
            return self._break(at)
        return at + 1

    def _in_hex(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._break(at)
        self._hex_digits -= 1
        if not self._hex_digits:
            self._state = self._string
        return at + 1

    def _in_word(self, text: str, at: int) -> int:
        end = _end_of(_WORD_BODY, text, at)
        self._word += text[at:end]
        if not (_WORD_START.fullmatch(self._word) or any(name.startswith(self._word) for name in _NAMES)):
            return self._break(at)
        if end < len(text):
            if not _WORD.fullmatch(self._word):
                return self._break(end)
            self._end_value()
        return end

    def _colon(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._break(at)
        self._state = self._value
        return at + 1

    def _after_value(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._state = self._key if self._open[-1] == "{" else self._value
            return at + 1
        if text[at] == _CLOSERS[self._open[-1]]:
            return self._close(at)
        return self._break(at)

    def _close(self, at: int) -> int:
        self._open.pop()
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._state = self._after_value
        self.is_done = not self._open


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value, with or without white space around it."""
    scanner = JsonScanner()
    end = scanner.scan(text, 0)
    return scanner.finish() and _skip_space(text, end) == len(text)


def _skip_space(text: str, at: int) -> int:
    return _end_of(_SPACE, text, at)


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None, "these patterns match the empty string"
    return match.end()
