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

    The result does not depend on how the stream was cut into pieces. Text that is not a call comes out unchanged.
    """

    def feed(self, text: str) -> list[Piece]:
        """The pieces that `text` has made certain."""
        ...

    def finish(self, *, cut_off: bool = False) -> list[Piece]:
        """The pieces that were held back, when no more text comes. With `cut_off`, a begun call is not text."""
        ...


class Outcome(enum.Enum):
    """How reading a call ended."""

    NO_CALL = enum.auto()  # nothing was given: it is text
    CALL = enum.auto()
    BROKEN = enum.auto()  # the call was opened, but its arguments are not what the format asks for


class ToolParser(TextScanner):
    """A format's parser. `tools` are the ones on offer. `new_id` makes ids of calls, by default as the format's do.

    A call is opened once its name and the beginning of its arguments are certain. From then on its arguments are passed
    on as they come. Incomplete or malformed arguments are not repaired: the client gets them as the model wrote them.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """The format's tags. They are shown to the parser even where the tokenizer has them as special tokens."""
    is_tagged: ClassVar[bool] = True
    """Whether a call is recognised by its tag, and not by its place at the beginning of an answer."""
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
        # If a call was cut off before its arguments, the name of an offered function is evidence enough.
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

        With `known_keys_only`, an object with any other key is not a call. For formats that mark calls with no tag.
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
        """Skips a JSON value; False if there is none."""
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
        """Passes a JSON value on as the open call's arguments, as it comes. False if it breaks off or is not JSON."""
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
        """Arguments that are an object, a string with the text of an object, or null. None for anything else."""
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
        """Passes text on as arguments until one of `tags` has been read. Returns that tag, or None at the end."""
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
        """Skips the tag that closes a call, if it comes next. Models sometimes stop without it."""
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
