"""Tool calls in a model's text: what every format's parser does, and what formats share."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from ...ids import new_id
from ...protocol.chat import Tool
from ..pieces import Piece
from ..text_scanner import Steps, TextScanner
from .call_format import CallFormat
from .json_scanner import JsonScanner, mended_json
from .values import is_encodable

if TYPE_CHECKING:
    from tidewheel.engine.text.tokenizer import Tokenizer

_CALL_KEYS = ("name", "type", "id")


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
    on as they come, mended as JsonScanner does. Where that does not help, the client gets them as the model wrote them.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """The format's tags. They are shown to the parser even where the tokenizer has them as special tokens."""
    ends: ClassVar[tuple[str, ...]] = ()
    """The tags that a call must end before, if not just `markers`."""
    is_tagged: ClassVar[bool] = True
    """Whether a call is recognised by its tag, and not by its place at the beginning of an answer."""
    name_keys: ClassVar[tuple[str, ...]] = ("name",)
    """The keys of a call's object that may have the function's name."""
    argument_keys: ClassVar[tuple[str, ...]] = ("arguments", "parameters")
    """The call's keys that may have the arguments."""
    call_formats: ClassVar[tuple[CallFormat, ...]] = ()
    """How models write calls, of several kinds if they differ."""

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str] | None = None) -> None:
        super().__init__()
        self._tools = tools
        self._new_id = new_id or self.new_id

    @classmethod
    def in_vocabulary(cls, tokenizer: Tokenizer) -> type[ToolParser]:
        """The parser for a model with this tokenizer, where its tags depend on that."""
        return cls

    @staticmethod
    def new_id() -> str:
        """An id for a call that this format's chat templates take."""
        return f"call_{new_id()[:24]}"

    def _start_call(self, name: str) -> None:
        self._open_call(self._new_id(), name)

    def _reject(self) -> None:
        # If a call was cut off before its arguments, the name of an offered function is evidence enough.
        if self._cut_off and self._named is not None and self._is_offered(self._named):
            self._start_call(self._named)
            self._settle(len(self._text))
        super()._reject()

    def _is_offered(self, name: str) -> bool:
        return any(tool.function.name == name for tool in self._tools)

    def _json_calls(self, *, is_marked: bool = True) -> Steps[Outcome]:
        """One call as a JSON object, or a list of them. Objects that follow the first are calls too."""
        yield from self._spaces()
        in_list = yield from self._literal("[")
        yield from self._spaces()
        outcome = yield from self._json_call(is_marked=is_marked)
        if outcome is not Outcome.CALL:
            return outcome
        while True:
            yield from self._skip_surplus("}")
            yield from self._spaces()
            if in_list and (yield from self._literal("]")):
                yield from self._skip_surplus("]}")
                return Outcome.CALL
            if (yield from self._literal(",")):
                yield from self._spaces()
            outcome = yield from self._json_call(is_marked=is_marked)
            if outcome is Outcome.BROKEN:
                return Outcome.BROKEN
            if outcome is Outcome.NO_CALL:
                break
        self._at = 0
        return Outcome.CALL

    def _json_call(self, *, is_marked: bool = True) -> Steps[Outcome]:
        """One call: a JSON object of a name and its `arguments`, or `parameters`.

        Without arguments it is a call only if its function is on offer. Where no tag marks a call, an object with any
        other key is not a call.
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
            is_known = is_marked or key in (*_CALL_KEYS, *self.argument_keys)
            if key is None or not is_known or not (yield from self._literal(":")):
                break
            yield from self._spaces()
            if key in self.name_keys and name is None:
                name = self._named = yield from self._json_string()
                if not name:
                    return Outcome.NO_CALL
            elif key in self.argument_keys and arguments is None:
                if name is not None and (yield from self._peek()) == "{":
                    self._start_call(name)
                    is_open, arguments = True, ""
                    if not (yield from self._json_arguments()):
                        return Outcome.BROKEN
                else:
                    arguments = yield from self._whole_arguments()
                    if arguments is None:
                        return Outcome.NO_CALL
            elif (yield from self._json_value()) is None:
                break
            yield from self._spaces()
            if (yield from self._literal(",")):
                yield from self._spaces()
                if (yield from self._peek()) != "}":
                    continue
            if not (yield from self._literal("}")):
                break
            if name is None or not (arguments is not None or self._is_offered(name)):
                return Outcome.NO_CALL
            if not is_open:
                self._start_call(name)
                self._add_arguments(arguments or "{}")
            self._settle()
            return Outcome.CALL
        # The arguments were whole, so the call is; what follows them is not part of it.
        self._at = 0 if is_open else self._at
        return Outcome.CALL if is_open else Outcome.NO_CALL

    def _json_value(self) -> Steps[str | None]:
        """Skips a JSON value and returns its text; None if there is none."""
        scanner = JsonScanner(mends=True)
        while True:
            self._at = scanner.scan(self._text, self._at)
            if scanner.is_done:
                return scanner.take()
            if scanner.is_broken or not (yield from self._more()):
                return None

    def _json_string(self) -> Steps[str | None]:
        """A JSON string's value; None if it is none."""
        text = (yield from self._json_value()) if (yield from self._peek()) == '"' else None
        if text is None:
            return None
        value: str = json.loads(text)
        return value if is_encodable(value) else None

    def _json_arguments(self) -> Steps[bool]:
        """Passes a JSON value on as the open call's arguments, as it comes. False if it breaks off or is not JSON."""
        scanner = JsonScanner(mends=True)
        while True:
            self._at = scanner.scan(self._text, self._at)
            self._add_arguments(scanner.take())
            self._settle()
            if scanner.is_done:
                return True
            if scanner.is_broken or not (yield from self._more()):
                break
        closing = scanner.completion()
        if closing is not None and (yield from self._ends_here()):
            self._add_arguments(closing)
            return True
        self._add_arguments(scanner.rest())
        return False

    def _ends_here(self) -> Steps[bool]:
        """Whether a call has to end where the unsettled text begins: the model itself stops, or writes a tag."""
        if not (yield from self._peek()):
            return not self._cut_off
        for tag in self.ends or self.markers:
            if (yield from self._literal(tag)):
                self._at = 0
                return True
        return False

    def _skip_surplus(self, brackets: str) -> Steps[None]:
        """Uses up closing brackets that nothing has opened."""
        self._settle()
        while True:
            yield from self._spaces()
            character = yield from self._peek()
            if not character or character not in brackets:
                self._at = 0
                return
            self._at += 1
            self._settle()

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
        text = yield from self._json_value()
        if text is None:
            return None
        if text.startswith('"'):
            text = json.loads(text).strip()
        if text in ("", "null"):
            return "{}"
        mended = mended_json(text) if text.startswith("{") else None
        return mended if mended is not None and is_encodable(mended) else None

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
    """Formats whose calls are JSON, one or a list, after one of `opening` and, if there is one, before `closing`."""

    opening: ClassVar[tuple[str, ...]]
    closing: ClassVar[str]

    def _parse(self) -> Steps[None]:
        while (yield from self._text_until(*self.opening)) is not None:
            outcome = yield from self._json_calls()
            if outcome is Outcome.NO_CALL:
                self._reject()
            elif outcome is Outcome.BROKEN:
                yield from self._raw_arguments(self.closing or self.opening[0])
                self._settle(None if self.closing else 0)
            elif self.closing:
                yield from self._close(self.closing)
