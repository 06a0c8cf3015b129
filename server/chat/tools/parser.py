"""Tool calls in a model's text: what every format's parser does, and what formats share."""

from __future__ import annotations

import enum
import json
import uuid
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from ...protocol.chat import Tool
from ..pieces import Piece
from ..text_scanner import Steps, TextScanner
from .call_format import CallFormat
from .json_scanner import JsonScanner, is_json
from .values import is_encodable

_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = ("name", "type", "id", *_ARGUMENTS)


class ToolCallParser(Protocol):
    """Splits one choice's text, as it arrives, into text for the user and tool calls, in their order.

    The pieces add up to the same whatever the text was cut into, and text that is no call comes out unchanged.
    """

    def feed(self, text: str) -> list[Piece]:
        """What became certain with `text`."""
        ...

    def finish(self, *, cut_off: bool = False) -> list[Piece]:
        """What was held back, once no more text comes. Was it `cut_off`, a call that had begun does not become text."""
        ...


class Outcome(enum.Enum):
    """How reading a call ended."""

    NO_CALL = enum.auto()  # nothing was given: it is text
    CALL = enum.auto()
    BROKEN = enum.auto()  # the call was opened, but its arguments are not what the format asks for


class ToolParser(TextScanner):
    """A format's parser. `tools` are the ones on offer. `new_id` makes ids of calls, by default as the format's do.

    Once a call's name and the beginning of its arguments are certain, the call is opened and its arguments are given
    as they come. Arguments that break off or turn out malformed stay as the model wrote them, so that whoever is to
    run the call notices: nothing is mended.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """The format's tags. They are shown to the parser even where the tokenizer has them as special tokens."""
    call_formats: ClassVar[tuple[CallFormat, ...]] = ()
    """How models write calls, of several kinds if they differ; none where no grammar can tell."""

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str] | None = None) -> None:
        super().__init__()
        self._tools = tools
        self._new_id = new_id or self.new_id

    @staticmethod
    def new_id() -> str:
        """An id for a call that this format's chat templates take."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def _start_call(self, name: str) -> None:
        self._open_call(self._new_id(), name)

    def _reject(self) -> None:
        # Of a call that was cut off before its arguments, a function on offer is evidence enough.
        if self._cut_off and self._named in {tool.function.name for tool in self._tools}:
            assert self._named is not None
            self._start_call(self._named)
            self._settle(len(self._text))
        super()._reject()

    def _json_calls(self) -> Steps[Outcome]:
        """One call as a JSON object, or a list of them."""
        yield from self._spaces()
        if not (yield from self._literal("[")):
            return (yield from self._json_call())
        yield from self._spaces()
        outcome = yield from self._json_call()
        if outcome is not Outcome.CALL:
            return outcome
        while True:
            yield from self._spaces()
            if (yield from self._literal("]")):
                self._settle()
                return Outcome.CALL
            if not (yield from self._literal(",")):
                break
            yield from self._spaces()
            outcome = yield from self._json_call()
            if outcome is Outcome.BROKEN:
                return Outcome.BROKEN
            if outcome is Outcome.NO_CALL:
                break
        self._at = 0
        return Outcome.CALL

    def _json_call(self, *, known_keys_only: bool = False) -> Steps[Outcome]:
        """One call: a JSON object of a name and its `arguments`, or `parameters`.

        `known_keys_only` lets any other key tell that it is no call, where there is no tag to tell that it is one.
        """
        name: str | None = None
        arguments: str | None = None
        is_open = False
        if not (yield from self._literal("{")):
            return Outcome.NO_CALL
        yield from self._spaces()
        if (yield from self._literal("}")):
            return Outcome.NO_CALL
        while True:
            key = yield from self._json_string()
            yield from self._spaces()
            if key is None or (known_keys_only and key not in _CALL_KEYS) or not (yield from self._literal(":")):
                break
            yield from self._spaces()
            if key == "name" and name is None:
                name = self._named = yield from self._json_string()
                if not name:
                    return Outcome.NO_CALL
            elif key in _ARGUMENTS and arguments is None:
                if name is not None and (yield from self._peek()) == "{":
                    self._start_call(name)
                    is_open, arguments = True, ""
                    if not (yield from self._json_arguments()):
                        return Outcome.BROKEN
                else:
                    arguments = yield from self._whole_arguments()
                    if arguments is None:
                        return Outcome.NO_CALL
            elif not (yield from self._json_value()):
                break
            yield from self._spaces()
            if (yield from self._literal("}")):
                if name is None:
                    return Outcome.NO_CALL
                if not is_open:
                    self._start_call(name)
                    self._add_arguments(arguments or "{}")
                self._settle()
                return Outcome.CALL
            if not (yield from self._literal(",")):
                break
            yield from self._spaces()
        # The arguments were whole, so the call is; what follows them is not part of it.
        self._at = 0 if is_open else self._at
        return Outcome.CALL if is_open else Outcome.NO_CALL

    def _json_value(self) -> Steps[bool]:
        """Skips a JSON value; False if it is none."""
        scanner = JsonScanner()
        while True:
            self._at = scanner.scan(self._text, self._at)
            if scanner.is_done or scanner.is_broken or not (yield from self._more()):
                return scanner.is_done

    def _json_string(self) -> Steps[str | None]:
        """A JSON string's value; None if it is none."""
        start = self._at
        if (yield from self._peek()) != '"' or not (yield from self._json_value()):
            return None
        value: str = json.loads(self._text[start : self._at])
        return value if is_encodable(value) else None

    def _json_arguments(self) -> Steps[bool]:
        """Gives a JSON value as the open call's arguments while it comes; False if it breaks off or is none."""
        scanner = JsonScanner()
        while True:
            self._at = scanner.scan(self._text, self._at)
            self._add_arguments(self._text[: self._at])
            self._settle()
            if scanner.is_done or scanner.is_broken or not (yield from self._more()):
                return scanner.is_done

    def _demanded_arguments(self) -> Steps[None]:
        """Gives the open call's arguments, which a grammar has seen to: if they are no JSON, a schema wants it so."""
        if not (yield from self._json_arguments()):
            yield from self._raw_arguments()

    def _skip(self, *literals: str) -> Steps[bool]:
        """Skips these and JSON's white space around them; False if something else comes."""
        for literal in literals:
            yield from self._spaces()
            if not (yield from self._literal(literal)):
                return False
        yield from self._spaces()
        return True

    def _whole_arguments(self) -> Steps[str | None]:
        """Arguments as an object, as such an object's text in a string, or null; None if they are something else."""
        start = self._at
        if not (yield from self._json_value()):
            return None
        text = self._text[start : self._at]
        if text.startswith('"'):
            text = json.loads(text).strip()
        if text in ("", "null"):
            return "{}"
        return text if text.startswith("{") and is_json(text) and is_encodable(text) else None

    def _raw_arguments(self, *tags: str) -> Steps[str | None]:
        """Gives text as arguments, as it is, until one of `tags` has been read; returns it, or None at the end."""
        while True:
            found = [(place, tag) for tag in tags if (place := self._text.find(tag)) >= 0]
            if found:
                place, tag = min(found)
                self._add_arguments(self._text[:place].rstrip())
                self._settle(place)
                self._at = self._resume = len(tag)
                return tag
            certain = len(self._text) - self._held_back(tags)
            self._add_arguments(self._text[:certain])
            self._settle(certain)
            if not (yield from self._more()):
                self._add_arguments(self._text)
                self._settle(len(self._text))
                return None

    def _close(self, tag: str) -> Steps[None]:
        """Skips the tag that closes a call, if it comes next. A model may stop where it was due."""
        yield from self._spaces()
        if (yield from self._literal(tag)):
            self._settle()
        else:
            self._at = 0


class TaggedJsonParser(ToolParser):
    """Formats whose calls are JSON, one or a list, after one of `opening` and perhaps before `closing`."""

    opening: ClassVar[tuple[str, ...]]
    closing: ClassVar[str]

    def _parse(self) -> Steps[None]:
        while (yield from self._text_until(*self.opening)) is not None:
            outcome = yield from self._json_calls()
            if outcome is Outcome.NO_CALL:
                self._reject()
            elif outcome is Outcome.BROKEN:
                yield from self._raw_arguments(self.closing)
                self._settle()
            else:
                yield from self._close(self.closing)
