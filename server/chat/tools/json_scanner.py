"""JSON that arrives in pieces: where a value ends, and where it stops being JSON (RFC 8259).

A scanner that mends also takes what models write instead of JSON, and gives JSON. Libraries that repair JSON want the
whole text at once. Here the arguments of a call are passed on as they come, so what was given cannot change any more.
Each character is looked at a bounded number of times.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING_BODY = re.compile(r'[^"\\\x00-\x1f]*')
_WORD_BODY = re.compile(r"[-+.0-9A-Za-z]*")
_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_WORD_START = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][-+]?[0-9]*)?)?")
_LONGEST_WORD = 4096  # it is looked at again with each piece
_NAMES = ("true", "false", "null")
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_CLOSERS = {"{": "}", "[": "]"}
_OPENERS = {"}": "{", "]": "["}


class JsonScanner:
    """Follows one value to its end. `is_done` and `is_broken` tell how it went.

    With `mends`, these are mended: raw line breaks and other control characters in strings, escapes that JSON does not
    have, missing commas and those that nothing follows, brackets that are missing or that nothing opened, and Python's
    True, False and None.
    """

    def __init__(self, *, mends: bool = False) -> None:
        self.is_done = False
        self.is_broken = False
        self._mends = mends
        self._open: list[str] = []
        self._num_open = {"{": 0, "[": 0}
        self._hex_digits = 0
        self._is_key = False
        self._state: Callable[[str, int], int] = self._value
        self._out: list[str] = []
        self._held: str | None = None  # what was read and may yet change: a comma, an escape or a word
        self._instead: str | None = None  # what is given for what a state has just read

    def scan(self, text: str, at: int) -> int:
        """Goes on with `text` from `at`. Returns where the value, or what is JSON of it, ends."""
        while at < len(text) and not self.is_done and not self.is_broken:
            end = self._state(text, at)
            given = text[at:end] if self._instead is None else self._instead
            if self._held is None:
                self._out.append(given)
            else:
                self._held += given
            self._instead = None
            at = end
        return at

    def finish(self) -> bool:
        """Whether the value is complete if no more text comes. Only a number or a word may end so."""
        if not self.is_done and not self._open and self._is_word_whole() and not self.is_broken:
            self._release(self._named(self._held or ""))
            self.is_done = True
        return self.is_done

    def take(self) -> str:
        """The value's text since the last call, as far as it is certain."""
        text = "".join(self._out)
        self._out = []
        return text

    def rest(self) -> str:
        """The text that is not certain yet, as it was read, when the value does not go on."""
        return self._held or ""

    def completion(self) -> str | None:
        """The text that completes the value if it ends here; None if something within is not whole."""
        closers = "".join(_CLOSERS[bracket] for bracket in reversed(self._open))
        if self._state == self._in_word:
            return self._named(self._held or "") + closers if self._is_word_whole() else None
        is_between = self._state in (self._after_value, self._first_key, self._first_item)
        return closers if is_between or (self._held or "").startswith(",") else None

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at

    def _release(self, text: str | None = None) -> None:
        """Give what was held; with `text`, that instead."""
        if self._held is not None:
            self._out.append(self._held if text is None else text)
            self._held = None

    def _value(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if at == len(text):
            return at
        character = text[at]
        if self._mends and self._held is not None:  # after a comma
            if character in _OPENERS:
                return self._closer(character, at)
            if character == ",":
                return self._drop(at)
        if character in "{[":
            self._release()
            self._open.append(character)
            self._num_open[character] += 1
            self._state = self._first_key if character == "{" else self._first_item
            return at + 1
        if character == '"':
            self._release()
            self._is_key, self._state = False, self._string
            return at + 1
        if character in "-0123456789tfn" or (self._mends and character in "TFN"):
            self._release()
            self._state = self._before_word
            return at
        return self._break(at)

    def _before_word(self, text: str, at: int) -> int:
        self._held, self._state = "", self._in_word
        return at

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
        if self._mends and self._held is not None:  # after a comma
            if text[at] in _OPENERS:
                return self._closer(text[at], at)
            if text[at] == ",":
                return self._drop(at)
        if text[at] != '"':
            return self._break(at)
        self._release()
        self._is_key, self._state = True, self._string
        return at + 1

    def _string(self, text: str, at: int) -> int:
        end = _end_of(_STRING_BODY, text, at)
        if end > at:
            return end
        character = text[at]
        if character == "\\":
            self._held, self._state = "", self._escape
        elif character == '"':
            if self._is_key:
                self._state = self._colon
            else:
                self._end_value()
        elif self._mends:
            self._instead = json.dumps(character)[1:-1]
        else:
            return self._break(at)
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._hex_digits, self._state = 4, self._in_hex
            return at + 1
        if text[at] in '"\\/bfnrt':
            self._release()
        elif not self._mends:
            return self._break(at)
        elif text[at] == "'":
            self._release("")
        else:
            return self._no_escape(at)
        self._state = self._string
        return at + 1

    def _in_hex(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._no_escape(at) if self._mends else self._break(at)
        self._hex_digits -= 1
        if not self._hex_digits:
            self._release()
            self._state = self._string
        return at + 1

    def _no_escape(self, at: int) -> int:
        self._release("\\" + (self._held or ""))
        self._state = self._string
        return at

    def _in_word(self, text: str, at: int) -> int:
        end = _end_of(_WORD_BODY, text, at)
        word = (self._held or "") + text[at:end]
        names = (*_NAMES, *_PYTHON_NAMES) if self._mends else _NAMES
        if len(word) > _LONGEST_WORD or not (
            _WORD_START.fullmatch(word) or any(name.startswith(word) for name in names)
        ):
            return self._break(at)
        if end < len(text):
            if not self._is_word(word):
                return self._break(at)
            self._instead = ""
            self._release(self._named(word))
            self._end_value()
        return end

    def _is_word(self, word: str) -> bool:
        return _WORD.fullmatch(word) is not None or (self._mends and word in _PYTHON_NAMES)

    def _is_word_whole(self) -> bool:
        return self._state == self._in_word and self._is_word(self._held or "")

    def _named(self, word: str) -> str:
        return _PYTHON_NAMES.get(word, word) if self._mends else word

    def _colon(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._break(at)
        self._state = self._value
        return at + 1

    def _after_value(self, text: str, at: int) -> int:
        start, at = at, _skip_space(text, at)
        if at == len(text):
            return at
        character, bracket = text[at], self._open[-1]
        if character == ",":
            self._state = self._key if bracket == "{" else self._value
            self._held = ""
            return at + 1
        if character == _CLOSERS[bracket]:
            return self._close(at)
        if self._mends and character in _OPENERS:
            return self._closer(character, at)
        if self._mends and (character == '"' or (character in "{[" and bracket == "[")):  # a comma is missing
            self._instead = text[start:at] + ","
            self._state = self._key if bracket == "{" else self._value
            return at
        return self._break(at)

    def _closer(self, character: str, at: int) -> int:
        """Takes a closing bracket where another one is due: those are missing, or nothing opened this one."""
        opener = _OPENERS[character]
        if not self._num_open[opener]:
            return self._drop(at)
        if self._held is not None:
            self._release(self._held[1:])
        while self._open[-1] != opener:
            self._num_open[self._open[-1]] -= 1
            self._out.append(_CLOSERS[self._open.pop()])
        return self._close(at)

    def _drop(self, at: int) -> int:
        self._instead = ""
        return at + 1

    def _close(self, at: int) -> int:
        self._num_open[self._open.pop()] -= 1
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self.is_done = not self._open
        self._state = self._after_value


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value, with or without white space around it."""
    scanner = JsonScanner()
    end = scanner.scan(text, 0)
    return scanner.finish() and _skip_space(text, end) == len(text)


def mended_json(text: str) -> str | None:
    """The one JSON value that `text` is, mended as JsonScanner does; None if it is none."""
    scanner = JsonScanner(mends=True)
    end = scanner.scan(text, 0)
    if scanner.finish():
        return scanner.take() if not text[end:].strip(" \t\n\r}]") else None
    closing = None if scanner.is_broken else scanner.completion()
    return None if closing is None else scanner.take() + closing


def _skip_space(text: str, at: int) -> int:
    return _end_of(_SPACE, text, at)


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None, "these patterns match the empty string"
    return match.end()
