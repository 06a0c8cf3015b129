"""OpenAI's harmony format, in which gpt-oss answers: messages, each with a header that says what it is.

`<|start|>ROLE<|channel|>CHANNEL to=RECIPIENT <|constrain|>TYPE<|message|>TEXT<|end|>`

Text in the channel `analysis` is reasoning, and other text is for the user. A message to a recipient calls that
function; the recipient may also stand before the channel. `<|call|>` and `<|return|>` end a message and the turn. The
beginning of the first header is in the prompt. Models leave out parts of headers, or write some of them twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from .text_scanner import Steps, TextScanner

if TYPE_CHECKING:
    from tidewheel.engine.text.tokenizer import Tokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

Place: TypeAlias = Literal["outside", "header", "reasoning", "text", "call"]
"""What a text goes on within."""

_ENDS = (END, CALL, RETURN)
_STOPS = (START, CHANNEL, *_ENDS)  # models forget to end a message before the next one
_STOP = re.compile("|".join(map(re.escape, _STOPS)))
_HEADER_ENDS = re.compile("|".join(map(re.escape, (MESSAGE, *_ENDS, START))))
_LONGEST_HEADER = 512  # characters; and tokens, where tokens are counted
_PARAGRAPH = "\n\n"  # between two messages of one kind

_ROLE = re.compile(r"(?:<\|start\|>)?\s*([^\s<]*)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]*)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.:/@-]{1,128})(?=[\s<]|$)")
_WHOLE_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.:/@-]{1,128})(?=[\s<])")
_NO_FUNCTIONS = ("assistant", "user", "all")
_ROLES = ("assistant", "user", "system", "developer", "tool")
_HEADER_TAGS = (CHANNEL, CONSTRAIN, MESSAGE)
_TO = "to="
_ANY_RECIPIENT = re.compile(r"^to=[\w.:/@-]*\s*")
_STARTLESS = re.compile(
    rf"\s*(?:(?:{'|'.join(_ROLES)})\s*)?(?:to=[\w.:/@-]{{1,128}}\s*)?(?=<\|(?:channel|constrain|message)\|>)"
)
_OTHER_ROLES = re.compile(r"user|system|developer|tool|functions(\..*)?")


def is_harmony(template: str) -> bool:
    """Whether a chat template writes this format."""
    return all(tag in template for tag in (START, CHANNEL, MESSAGE))


class Header(NamedTuple):
    """What a message is. `recipient` is the function that it calls, empty if it calls none."""

    role: str
    channel: str
    recipient: str

    @classmethod
    def of(cls, text: str) -> Header:
        """Reads a header: the text before `<|message|>`. Of parts that are there twice, the first counts."""
        role, channel, to = (found[1] if (found := p.search(text)) else "" for p in (_ROLE, _CHANNEL, _RECIPIENT))
        return cls(role, channel, "" if to in _NO_FUNCTIONS else to)

    def place(self, *, reads_calls: bool) -> Place:
        """The kind of text in the message. Text that the model makes up in another role's name counts as reasoning."""
        if _OTHER_ROLES.fullmatch(self.role):
            return "reasoning"
        if self.recipient and reads_calls:
            return "call"
        return "reasoning" if self.channel == "analysis" else "text"


class HarmonyScanner(TextScanner):
    """Reads messages. Text outside of them is for the user; so is an invalid header, with its tags.

    White space between messages is left out.
    """

    new_call_id: Callable[[], str] | None = None
    """Makes ids of calls. Without it none are read, and what a message says to a function is text."""
    gives_reasoning = False
    """Whether reasoning is given apart from text."""
    has_reasoned = False
    """Whether there was any reasoning."""

    def __init__(self) -> None:
        super().__init__()
        self.place: Place = "outside"
        """Where the text goes on."""
        self._num_borrowed = 0  # characters of a header that are the prompt's
        self._is_new = False  # nothing of this message was given yet
        self._given: set[str] = set()  # of the kinds of text, those that a message before had
        self._has_messages = False
        self._gap = ""  # white space outside of messages, which may be followed by text

    def begin(self, prompt: str) -> None:
        """Take in how far the prompt's last message has come. To be called first."""
        start = prompt.rfind(START)
        message = prompt.find(MESSAGE, start) if start >= 0 else -1
        if start >= 0 and message < 0 and len(prompt) - start <= _LONGEST_HEADER:
            self.place, self._text = "header", prompt[start:]
            self._num_borrowed = len(self._text)
        if message < 0 or any(prompt.find(tag, start) >= 0 for tag in _ENDS):
            return
        body = message + len(MESSAGE)
        self.place = Header.of(prompt[start:message][:_LONGEST_HEADER]).place(reads_calls=False)
        self.has_reasoned = self.place == "reasoning"
        self._has_messages, self._is_new = True, body == len(prompt)
        if not self._is_new:
            self._given.add(self._kind())

    def _parse(self) -> Steps[None]:
        while (tag := (yield from self._text_to_tag())) is not None:
            if tag in _ENDS:
                self._settle()
                self._end_message("outside")
                continue
            before: Place = "outside" if self._num_borrowed else self.place
            self.place = "header"
            header = yield from self._header()
            if header is not None:
                self._begin_message(header, before)
            elif self._ended and self._cut_off:
                self._cut_header(before)
            else:  # it is text of the message around it, unless the prompt has it
                self.place = before
                self._give("" if self._num_borrowed else tag)
                self._settle(self._num_borrowed or len(tag))
            self._num_borrowed = 0
        self._end_message("outside")
        if not self._has_messages:
            self._emit_text(self._gap)

    def _text_to_tag(self) -> Steps[str | None]:
        """Gives text until one of `_STOPS` comes, which is read and not settled. Returns it, or None at the end.

        Outside of messages it may also be the beginning of a header that lacks `<|start|>`.
        """
        if self.place == "outside" and (startless := (yield from self._startless())):
            return startless
        while True:
            found = _STOP.search(self._text)
            if found is not None:
                self._give(self._text[: found.start()])
                self._settle(found.start())
                self._at = len(found[0])
                return found[0]
            held = self._begun_tag(_STOPS) if "<" in self._text[-len(CHANNEL) :] else 0  # most texts have none
            certain = len(self._text) - held
            self._give(self._text[:certain])
            self._settle(certain)
            if not (yield from self._more()):
                self._give("" if self._cut_off else self._text)
                self._settle(len(self._text))
                return None

    def _startless(self) -> Steps[str]:
        """Reads what stands before the first tag of a header without `<|start|>`, if such a header comes."""
        while _may_begin_header(begun := self._text[:_LONGEST_HEADER]):
            found = _STARTLESS.match(begun)
            if found is not None:
                self._at = found.end() if found[0].strip() else 0
                return begun[: self._at]
            if len(begun) == _LONGEST_HEADER or not (yield from self._more()):
                break
        return ""

    def _header(self) -> Steps[Header | None]:
        """The header at the beginning of the text, read with its `<|message|>`; None if it is not a header."""
        while True:
            if self._is_plain():
                return None
            found = _HEADER_ENDS.search(self._text, self._at)
            if found is not None:
                if found[0] != MESSAGE or found.start() > _LONGEST_HEADER:
                    return None
                self._at = found.end()
                return Header.of(self._text[: found.start()])
            if len(self._text) >= _LONGEST_HEADER + len(MESSAGE) or not (yield from self._more()):
                return None

    def _is_plain(self) -> bool:
        """Whether the answer does not go on with the header that the prompt began. Then it need not be held back."""
        begun, said = self._text[: self._num_borrowed], self._text[self._num_borrowed :].lstrip()
        if not said or begun in ("", START) or CHANNEL in begun:
            return False
        return not any(said.startswith(part[: len(said)]) for part in ("to=", CHANNEL, CONSTRAIN, MESSAGE))

    def _cut_header(self, before: Place) -> None:
        """Leaves out a header that was cut off. The name of a function is evidence enough of a call."""
        found = _WHOLE_RECIPIENT.search(self._text)
        if found is not None and found[1] not in _NO_FUNCTIONS and self.new_call_id is not None:
            self._end_message(before)
            self._open_call(self.new_call_id(), found[1])
        self._settle(len(self._text))

    def _begin_message(self, header: Header, before: Place) -> None:
        self.place = before
        self._end_message(header.place(reads_calls=self.new_call_id is not None))
        self._has_messages = self._is_new = True
        self._gap = ""
        if self.place == "call" and self.new_call_id is not None:
            self._open_call(self.new_call_id(), header.recipient)
        self.has_reasoned = self.has_reasoned or self.place == "reasoning"
        self._settle()

    def _end_message(self, place: Place) -> None:
        """Ends the message, if one is open. What comes is in `place`."""
        if self.place == "call" and self._is_new and not self._cut_off:
            self._add_arguments("{}")
        self.place = place

    def _give(self, text: str) -> None:
        """Gives text as what it is in its place."""
        if not text:
            return
        if self.place == "call":
            text = text.lstrip() if self._is_new else text
            self._add_arguments(text)
            self._is_new = self._is_new and not text
            return
        if self.place == "outside":
            text = self._gap + text
            self._gap = text[len(text.rstrip()) :]
            text = text.rstrip()
        kind = self._kind()
        if self._is_new and kind in self._given:
            text = _PARAGRAPH + text
        if text:
            self._is_new = False
            self._given.add(kind)
        if kind == "reasoning":
            self._emit_reasoning(text)
        else:
            self._emit_text(text)

    def _kind(self) -> Literal["reasoning", "text"]:
        """What text in this place is given as."""
        return "reasoning" if self.place == "reasoning" and self.gives_reasoning else "text"


def _may_begin_header(text: str) -> bool:
    """Whether a text may turn out to begin with a header that lacks `<|start|>`."""
    rest = text.lstrip()
    role = next((role for role in _ROLES if rest.startswith(role)), "")
    if not role and any(name.startswith(rest) for name in _ROLES):
        return True
    rest = rest.removeprefix(role).lstrip()
    if rest.startswith(_TO):
        rest = _ANY_RECIPIENT.sub("", rest, count=1)
    elif _TO.startswith(rest):
        return True
    return any(tag.startswith(rest) or rest.startswith(tag) for tag in _HEADER_TAGS)


class HarmonyParser(HarmonyScanner):
    """Splits one choice's text into reasoning, text and calls.

    `begun` is the prompt, in which the first message has begun. With `continues` it ends within text for the user.
    `new_call_id` and `gives_reasoning` are as in HarmonyScanner.
    """

    def __init__(
        self,
        begun: str,
        *,
        continues: bool = False,
        new_call_id: Callable[[], str] | None = None,
        gives_reasoning: bool = True,
    ) -> None:
        super().__init__()
        self.new_call_id = new_call_id
        self.gives_reasoning = gives_reasoning
        self.begin(begun)
        if continues and self.place == "outside":
            self.place = "text"


class ReasoningTokens:
    """Counts the tokens of reasoning messages, with their headers and ends. They are told apart by special tokens."""

    def __init__(self, tokenizer: Tokenizer, scanner: HarmonyScanner) -> None:
        """`scanner` has taken in the prompt, and nothing of the answer."""
        self._tokenizer = tokenizer
        self._reads_calls = scanner.new_call_id is not None
        self._ids = {tokenizer.token_to_id(tag): tag for tag in TAGS}
        self._is_reasoning = scanner.place == "reasoning"
        self._header: list[int] | None = [] if scanner.place == "header" else None
        self._in_message = 0
        self._in_others = 0

    @property
    def count(self) -> int:
        """The tokens so far."""
        return self._in_others + (self._in_message if self._is_reasoning else 0)

    def push(self, token_ids: Iterable[int]) -> None:
        """Takes in tokens of the answer."""
        for token in token_ids:
            tag = self._ids.get(token)
            if tag == START or (tag == CHANNEL and self._header is None):
                self._end_message()
                self._header = []
            self._in_message += 1
            if self._header is not None and tag != MESSAGE:
                self._header += [token][: len(self._header) < _LONGEST_HEADER]
            if tag == MESSAGE and self._header is not None:
                header = Header.of(self._tokenizer.decode(self._header, skip_special_tokens=False))
                self._is_reasoning = header.place(reads_calls=self._reads_calls) == "reasoning"
                self._header = None
            elif tag in _ENDS:
                self._end_message()
                self._header = None

    def _end_message(self) -> None:
        self._in_others, self._in_message, self._is_reasoning = self.count, 0, False
