"""Reasoning in a model's text: what stands between two tags before the answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from .harmony import HarmonyParser
from .pieces import Piece
from .text_scanner import Steps, TextScanner

if TYPE_CHECKING:
    from tidewheel.engine.text.tokenizer import Tokenizer

    from .tools.parser import ToolCallParser


class ReasoningParser(TextScanner):
    """Splits one choice's text into reasoning and the rest. Used for models that reason only at the beginning.

    Models forget at times to close the reasoning before they call a function. So `calls`, a parser of its own for this,
    watches the reasoning. If it finds a call and the closing tag never comes, the reasoning ends where the call begins.
    Until that is certain, the call is held back.

    `begun` is the end of the prompt. A template may have opened the reasoning there, or closed it at once to keep the
    model from thinking. With `continues`, `begun` is the text that the model has already written in this turn. White
    space around the tags belongs to neither part.
    """

    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    label: ClassVar[str] = ""
    """What the model writes behind the opening tag, as a part of it."""
    wrappers: ClassVar[tuple[str, ...]] = ()
    """Other tags that the parser has to see, even where the tokenizer has them as special tokens."""
    always_reasons: ClassVar[bool] = False
    """Whether a turn begins with reasoning although neither the prompt nor the model says so."""

    def __init__(self, begun: str, *, continues: bool = False, calls: ToolCallParser | None = None) -> None:
        super().__init__()
        self._watch = None if calls is None else _CallWatch(calls)
        self.is_open = self.always_reasons
        """Whether the text begins within reasoning."""
        self.is_over = False
        """Whether the reasoning, if any, has ended."""
        if continues:
            self.is_open = begun.rfind(self.opening) > begun.rfind(self.closing)
            self.is_over = not self.is_open and bool(begun.strip())
        elif begun.rstrip().endswith((self.opening, self.opening + self.label)):
            self.is_open = True
        elif begun.rstrip().endswith(self.closing):
            self.is_over = True
        self.has_reasoned = False
        """Whether there was any reasoning, in the prompt's tag or the model's."""
        self.ended_by = ""
        """The text from the first call on, if a call has ended the reasoning."""

    @property
    def is_done(self) -> bool:
        """Whether the text that follows has nothing for this parser."""
        return self.is_over

    def _parse(self) -> Steps[None]:
        if not self.is_over:
            yield from self._spaces()
            if (yield from self._literal(self.opening)) or self.is_open:
                self.has_reasoned = True
                yield from self._reasoning()
        self.is_over = True

    def _reasoning(self) -> Steps[None]:
        yield from self._spaces()
        if self.label and (yield from self._literal(self.label)):
            yield from self._spaces()
        self._settle()
        watch, watched, searched = self._watch, 0, 0  # places in the unsettled text
        while True:
            end = self._text.find(self.closing, searched)
            if end >= 0:
                self._emit_reasoning(self._text[:end].rstrip())
                self._settle(end + len(self.closing))
                yield from self._spaces()
                self._settle()
                return
            certain = len(self._text) - self._held_back((self.closing,))
            if watch is not None:
                certain = min(certain, watch.feed(self._text[watched:]))
                watch.drop(certain)
            self._emit_reasoning(self._text[:certain])
            self._settle(certain)
            watched, searched = len(self._text), max(0, len(self._text) - len(self.closing) + 1)
            if not (yield from self._more()):
                called = watch is not None and watch.finish(cut_off=self._cut_off)
                end = watch.num_before if called and watch is not None else len(self._text)
                self._emit_reasoning(self._text[:end].rstrip())
                self._settle(end)
                self.ended_by = self._text.lstrip()
                return


class _CallWatch:
    """Finds the first call in a text. `num_before` characters at the text's beginning are certain to be before it."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._has_call = False
        self.num_before = 0

    def feed(self, text: str) -> int:
        """More of the text. Returns `num_before`."""
        self._take(self._parser.feed(text))
        return self.num_before

    def drop(self, count: int) -> None:
        """Let the text begin `count` characters later, of those before the call."""
        self.num_before -= count

    def finish(self, *, cut_off: bool) -> bool:
        """Whether the text has a call, when no more comes."""
        self._take(self._parser.finish(cut_off=cut_off))
        return self._has_call

    def _take(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if self._has_call:
                return
            if isinstance(piece, str):  # as it stands in the text; only white space before a call is left out
                self.num_before += len(piece)
            else:
                self._has_call = True


class DeepSeekR1Parser(ReasoningParser):
    """DeepSeek R1 and its distillations, QwQ: they always reason, and older templates leave the first tag to them."""

    always_reasons = True


class MistralReasoningParser(ReasoningParser):
    """Magistral."""

    opening = "[THINK]"
    closing = "[/THINK]"


class SeedOssReasoningParser(ReasoningParser):
    """Seed-OSS."""

    opening = "<seed:think>"
    closing = "</seed:think>"


class Gemma4ReasoningParser(ReasoningParser):
    """Gemma 4."""

    opening = "<|channel>"
    label = "thought"
    closing = "<channel|>"


class MiniMaxM3ReasoningParser(ReasoningParser):
    """MiniMax M3."""

    opening = "<mm:think>"
    closing = "</mm:think>"


class CohereReasoningParser(ReasoningParser):
    """Command R7B, A and A+. What is for the user stands between tags too, which are left out."""

    opening = "<|START_THINKING|>"
    closing = "<|END_THINKING|>"
    wrappers = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")

    @property
    def is_done(self) -> bool:
        """See ReasoningParser."""
        return False

    def _parse(self) -> Steps[None]:
        yield from super()._parse()
        self._settle(0)
        while (yield from self._text_until(*self.wrappers)) is not None:
            self._settle()


REASONING_PARSERS: Mapping[str, type[ReasoningParser] | type[HarmonyParser]] = {
    "GptOss": HarmonyParser,
    "cohere_command3": CohereReasoningParser,
    "cohere_command4": CohereReasoningParser,
    "deepseek_r1": DeepSeekR1Parser,
    "deepseek_v3": ReasoningParser,
    "deepseek_v4": ReasoningParser,
    "gemma4": Gemma4ReasoningParser,
    "glm45": ReasoningParser,
    "glm47": ReasoningParser,
    "gpt_oss": HarmonyParser,
    "holo2": ReasoningParser,
    "kimi_k2": ReasoningParser,
    "mimo": ReasoningParser,
    "minimax_m2": ReasoningParser,
    "minimax_m3": MiniMaxM3ReasoningParser,
    "mistral": MistralReasoningParser,
    "nemotron_v3": ReasoningParser,
    "olmo3": ReasoningParser,
    "openai_gptoss": HarmonyParser,
    "qwen3": ReasoningParser,
    "seed_oss": SeedOssReasoningParser,
    "step3": ReasoningParser,
    "step3p5": ReasoningParser,
}
"""The parsers that `--reasoning-parser` names, by vLLM's names."""


def count_reasoning_tokens(token_ids: list[int], closing: str, tokenizer: Tokenizer, ended_by: str = "") -> int:
    """How many tokens are reasoning, in a turn that began with it. The closing tag counts.

    `ended_by` is as in ReasoningParser.
    """
    lengths = range(len(token_ids) + 1)
    if ended_by:  # the most tokens that can be left out before it
        return max(
            bisect_left(
                lengths,
                True,
                key=lambda n: ended_by not in tokenizer.decode(token_ids[n:], skip_special_tokens=False),
            )
            - 1,
            0,
        )
    tag = tokenizer.token_to_id(closing)
    if tag in token_ids:
        return token_ids.index(tag) + 1
    # The tag is spelt out in several tokens: the fewest tokens whose text has it.
    return min(
        bisect_left(lengths, True, key=lambda n: closing in tokenizer.decode(token_ids[:n], skip_special_tokens=False)),
        len(token_ids),
    )
