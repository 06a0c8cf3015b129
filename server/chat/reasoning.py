"""Reasoning in a model's text: what stands between two tags before the answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from .harmony import HarmonyParser
from .text_scanner import Steps, TextScanner

if TYPE_CHECKING:
    from tidewheel.engine.text.tokenizer import Tokenizer


class ReasoningParser(TextScanner):
    """Splits one choice's text into reasoning and the rest. Used for models that reason only at the beginning.

    `begun` is the end of the prompt. A template may have opened the reasoning there, or closed it at once to keep the
    model from thinking. With `continues`, `begun` is the text that the model has already written in this turn. White
    space around the tags belongs to neither part.
    """

    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    always_reasons: ClassVar[bool] = False
    """Whether a turn begins with reasoning although neither the prompt nor the model says so."""

    def __init__(self, begun: str, *, continues: bool = False) -> None:
        super().__init__()
        self.is_open = self.always_reasons
        """Whether the text begins within reasoning."""
        self.is_over = False
        """Whether the reasoning, if any, has ended."""
        if continues:
            self.is_open = begun.rfind(self.opening) > begun.rfind(self.closing)
            self.is_over = not self.is_open and bool(begun.strip())
        elif begun.rstrip().endswith(self.opening):
            self.is_open = True
        elif begun.rstrip().endswith(self.closing):
            self.is_over = True
        self.has_reasoned = False
        """Whether there was any reasoning, in the prompt's tag or the model's."""

    def _parse(self) -> Steps[None]:
        if not self.is_over:
            yield from self._spaces()
            if (yield from self._literal(self.opening)) or self.is_open:
                self.has_reasoned = True
                yield from self._reasoning()
        self.is_over = True

    def _reasoning(self) -> Steps[None]:
        yield from self._spaces()
        self._settle()
        while True:
            end = self._text.find(self.closing)
            if end >= 0:
                self._emit_reasoning(self._text[:end].rstrip())
                self._settle(end + len(self.closing))
                yield from self._spaces()
                self._settle()
                return
            certain = len(self._text) - self._held_back((self.closing,))
            self._emit_reasoning(self._text[:certain])
            self._settle(certain)
            if not (yield from self._more()):
                self._emit_reasoning(self._text.rstrip())
                self._settle(len(self._text))
                return


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


REASONING_PARSERS: Mapping[str, type[ReasoningParser] | type[HarmonyParser]] = {
    "GptOss": HarmonyParser,
    "deepseek_r1": DeepSeekR1Parser,
    "deepseek_v3": ReasoningParser,
    "glm45": ReasoningParser,
    "gpt_oss": HarmonyParser,
    "mistral": MistralReasoningParser,
    "olmo3": ReasoningParser,
    "openai_gptoss": HarmonyParser,
    "qwen3": ReasoningParser,
    "seed_oss": SeedOssReasoningParser,
}
"""The parsers that `--reasoning-parser` names, by vLLM's names."""


def count_reasoning_tokens(token_ids: list[int], closing: str, tokenizer: Tokenizer) -> int:
    """How many tokens are reasoning, in a turn that began with it. The closing tag counts."""
    tag = tokenizer.token_to_id(closing)
    if tag in token_ids:
        return token_ids.index(tag) + 1
    # The tag is spelt out in several tokens: the fewest tokens whose text has it.
    lengths = range(len(token_ids) + 1)
    return min(
        bisect_left(lengths, True, key=lambda n: closing in tokenizer.decode(token_ids[:n], skip_special_tokens=False)),
        len(token_ids),
    )
