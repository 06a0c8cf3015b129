"""The formats of reasoning, by model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .harmony import HarmonyParser
from .reasoning import ReasoningParser
from .tag_suffix import tag_suffix
from .text_scanner import Steps

if TYPE_CHECKING:
    from tidewheel.engine.text.tokenizer import Tokenizer

_NAME = re.compile(r"[\w.:/-]")
_LONGEST_NAME = 256  # characters


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


class SolarOpen2ReasoningParser(ReasoningParser):
    """Solar Open 2."""

    opening = "<|think:start|>"
    closing = "<|think:end|>"


class SolarOpenReasoningParser(ReasoningParser):
    """Solar Open: each part of an answer is a message."""

    opening = "<|think|>"
    closing = "<|end|>"
    answer_tags = (("<|begin|>assistant<|content|>", closing), ("<|content|>", closing))
    wrappers = ("<|begin|>assistant", "<|content|>", closing)
    specials = ("<|begin|>",)


class ApertusReasoningParser(ReasoningParser):
    """Apertus."""

    opening = "<|inner_prefix|>"
    closing = "<|inner_suffix|>"


class LongcatReasoningParser(ReasoningParser):
    """LongCat."""

    opening = "<longcat_think>"
    closing = "</longcat_think>"


class Ernie45ReasoningParser(ReasoningParser):
    """ERNIE 4.5."""

    answer_tags = (("<response>", "</response>"),)


class HunyuanA13BReasoningParser(ReasoningParser):
    """Hunyuan A13B."""

    answer_tags = (("<answer>", "</answer>"),)


class GraniteReasoningParser(ReasoningParser):
    """Granite 3.2, which writes sentences for tags, and 3.3."""

    opening = "Here is my thought process:"
    closing = "Here is my response:"
    other_openings = ("Here's my thought process:", "<think>")
    other_closings = ("Here's my response:", "</think>")
    answer_tags = (("<response>", "</response>"),)


class AprielReasoningParser(ReasoningParser):
    """Apriel."""

    opening = "Here are my reasoning steps:"
    closing = "[BEGIN FINAL RESPONSE]"
    answer_tags = (("", "[END FINAL RESPONSE]"),)


class CohereReasoningParser(ReasoningParser):
    """Command R7B, A and A+. What is for the user stands between tags too."""

    opening = "<|START_THINKING|>"
    closing = "<|END_THINKING|>"
    answer_tags = (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>"))
    wrappers = tuple(tag for pair in answer_tags for tag in pair)


class KimiK3ReasoningParser(ReasoningParser):
    """Kimi K3."""

    opening = "<|open|>think<|sep|>"
    closing = "<|close|>think<|sep|>"
    answer_tags = (("<|open|>response<|sep|>", "<|close|>response<|sep|>"),)
    wrappers = (*answer_tags[0], "<|close|>message<|sep|>")
    specials = ("<|open|>", "<|sep|>", "<|close|>")


class HyV3ReasoningParser(ReasoningParser):
    """Hunyuan 3. Some of its vocabularies have a suffix in every tag, such as `<think:6124c78e>`."""

    @classmethod
    def in_vocabulary(cls, tokenizer: Tokenizer) -> type[ReasoningParser]:
        """See ReasoningParser."""
        suffix = tag_suffix("think", tokenizer)
        tags = {"opening": f"<think{suffix}>", "closing": f"</think{suffix}>"}
        return type("SuffixedHyV3ReasoningParser", (cls,), tags) if suffix else cls


class InklingReasoningParser(ReasoningParser):
    """Inkling: messages of reasoning, text and calls, in any order. A header may name the function that is called."""

    opening = "<|content_thinking|>"
    closing = "<|end_message|>"
    repeats = True
    answer_tags = (("<|message_model|><|content_text|>", closing), ("<|content_text|>", closing))
    wrappers = ("<|message_model|>", "<|content_text|>", "<|content_model_end_sampling|>", closing)

    def __init__(self, begun: str, **options: Any) -> None:
        super().__init__(begun, **options)
        self._in_header = begun.endswith("<|message_model|>")

    def _parse(self) -> Steps[None]:
        if self.is_open:
            yield from self._thoughts()
        elif self._in_header:
            yield from self._header()
        while tag := (yield from self._text_until(self.opening, *self.wrappers)):
            if tag == self.opening:
                yield from self._thoughts()
                continue
            self._settle()
            if tag == "<|message_model|>":
                yield from self._header()

    def _thoughts(self) -> Steps[None]:
        self.has_reasoned = True
        yield from self._reasoning()
        self._watch = None  # which has seen the first only

    def _header(self) -> Steps[None]:
        """Leaves out a name before a message's kind."""
        while (character := (yield from self._peek())) and _NAME.match(character) and self._at < _LONGEST_NAME:
            self._at += 1
        end = self._at
        self._settle(end if (yield from self._literal("<|content_")) else 0)


class MuseGlimmerReasoningParser(ReasoningParser):
    """Muse Glimmer: messages that say who they are for: the model itself, a function or the user."""

    opening = " to=self<|message|>"
    closing = "<|eom|>"
    repeats = True
    answer_tags = (("<|start|>assistant to=user<|message|>", closing), (" to=user<|message|>", closing))
    wrappers = ("<|start|>assistant", closing, "<|eot|>")
    specials = ("<|start|>", "<|message|>")

    def __init__(self, begun: str, **options: Any) -> None:
        super().__init__(begun, **options)
        self._in_header = begun.endswith("<|start|>assistant")

    def _parse(self) -> Steps[None]:
        if self.is_open or (self._in_header and (yield from self._is_for_itself())):
            yield from self._thoughts()
        while tag := (yield from self._text_until(*self.wrappers)):
            self._settle()
            if tag == self.wrappers[0] and (yield from self._is_for_itself()):
                yield from self._thoughts()

    def _thoughts(self) -> Steps[None]:
        self.has_reasoned = True
        yield from self._reasoning()
        self._watch = None  # which has seen the first only

    def _is_for_itself(self) -> Steps[bool]:
        """Leaves out the rest of a header, and says whether it is for the model itself. What is no header stays."""
        name = ""
        if (yield from self._literal(" to=")):
            while (character := (yield from self._peek())) and _NAME.match(character) and self._at < _LONGEST_NAME:
                self._at += 1
            name = self._text[len(" to=") : self._at]
        is_header = bool(name) and (yield from self._literal("<|message|>"))
        self._settle(None if is_header else 0)
        return is_header and name == "self"


REASONING_PARSERS: Mapping[str, type[ReasoningParser] | type[HarmonyParser]] = {
    "GptOss": HarmonyParser,
    "apertus": ApertusReasoningParser,
    "apriel": AprielReasoningParser,
    "cohere_command3": CohereReasoningParser,
    "cohere_command4": CohereReasoningParser,
    "deepseek_r1": DeepSeekR1Parser,
    "deepseek_v3": ReasoningParser,
    "deepseek_v4": ReasoningParser,
    "deepseek_v41": ReasoningParser,
    "ernie45": Ernie45ReasoningParser,
    "gemma4": Gemma4ReasoningParser,
    "glm45": ReasoningParser,
    "glm47": ReasoningParser,
    "gpt_oss": HarmonyParser,
    "granite": GraniteReasoningParser,
    "holo2": ReasoningParser,
    "hunyuan_a13b": HunyuanA13BReasoningParser,
    "hy_v3": HyV3ReasoningParser,
    "hy_v4": HyV3ReasoningParser,
    "inkling": InklingReasoningParser,
    "kimi_k2": ReasoningParser,
    "kimi_k3": KimiK3ReasoningParser,
    "ling3": ReasoningParser,
    "longcat": LongcatReasoningParser,
    "mimo": ReasoningParser,
    "minimax_m2": ReasoningParser,
    "minimax_m3": MiniMaxM3ReasoningParser,
    "mistral": MistralReasoningParser,
    "muse_glimmer": MuseGlimmerReasoningParser,
    "nemotron_v3": ReasoningParser,
    "olmo3": ReasoningParser,
    "openai_gptoss": HarmonyParser,
    "poolside_v1": ReasoningParser,
    "qwen3": ReasoningParser,
    "seed_oss": SeedOssReasoningParser,
    "solar_open": SolarOpenReasoningParser,
    "solar_open2": SolarOpen2ReasoningParser,
    "step3": ReasoningParser,
    "step3p5": ReasoningParser,
}
"""The parsers that `--reasoning-parser` names, by vLLM's names."""
