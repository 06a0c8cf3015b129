"""AnswerParsers: what reads a model's reasoning and calls, chosen for each request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidewheel.engine.constraints.constraint import Preface
from tidewheel.engine.constraints.grammar import StructuredOutput
from tidewheel.engine.constraints.thinking_budget import ThinkingBudget
from tidewheel.engine.text.tokenizer import Tokenizer

from ..errors import bad_request
from ..generation.structured_output import compact, json_schema_output, structured_output
from ..generation.token_constraints import Calls, Frame
from ..protocol.chat import ChatCompletionRequest, Tool
from .answer import Answer
from .answer_frame import answer_frame
from .harmony import END, TAGS, HarmonyParser, ReasoningTokens
from .harmony_frame import ANALYSIS, harmony_frame
from .model_formats import ModelFormats
from .reasoning import ReasoningParser
from .reasoning_formats import REASONING_PARSERS
from .rendering import RenderedPrompt
from .tools import TOOL_CALL_PARSERS
from .tools.harmony import HarmonyToolParser
from .tools.parser import ToolParser
from .tools.tool_choice import RequestTools, calls_in_format, demanded_calls_parser, demanded_calls_schema

_BEGUN = 256  # characters at the prompt's end where a tag may begin


class AnswerParsers:
    """The parsers of one model's `formats`. `tool_parser` reads its calls, if there is one."""

    def __init__(self, formats: ModelFormats, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._no_calls_because = formats.no_calls_because
        self.tool_parser: type[ToolParser] | None = (
            TOOL_CALL_PARSERS[formats.tool_calls].in_vocabulary(tokenizer) if formats.tool_calls else None
        )
        reasoning = REASONING_PARSERS[formats.reasoning] if formats.reasoning else None
        self.reads_reasoning = reasoning is not None
        """Whether reasoning is separated from the answer."""
        self._gives_harmony_calls = self.tool_parser is HarmonyToolParser
        self.is_harmony = self._gives_harmony_calls or reasoning is HarmonyParser
        """Whether answers are messages in the harmony format."""
        self._reasoning_parser: type[ReasoningParser] | None = None
        self._tool_tags = self._special_tokens(self.tool_parser.markers if self.tool_parser else ())
        tags: tuple[str, ...] = TAGS if self.is_harmony else ()
        if reasoning is not None and issubclass(reasoning, ReasoningParser) and not self.is_harmony:
            self._reasoning_parser = reasoning.in_vocabulary(tokenizer)
            tags = self._reasoning_parser.tags()
        self._reasoning_tags = self._special_tokens(tags)

    def check_tools(self, tools: RequestTools) -> None:
        """Raises ApiError (400) if the model may call tools, but no parser would read its calls."""
        if tools.placed and self.tool_parser is None and not tools.demands_calls:
            raise bad_request(
                f"tool calls cannot be parsed: {self._no_calls_because}. Start the server with the "
                '--tool-call-parser of its model, or set tool_choice to "none", "required" or a function',
                "tools",
                "unsupported_parameter",
            )

    def shown_tokens(self, tools: RequestTools) -> frozenset[int]:
        """The special tokens that an answer's text must have for the parsers to see them."""
        return self._reasoning_tags | self._tool_tags if tools.placed else self._reasoning_tags

    def preface(self, prompt: RenderedPrompt) -> Preface | None:
        """The reasoning that may come before the part of the answer that a grammar constrains."""
        reasoning = self._reasoning(prompt)
        if reasoning is None or reasoning.is_over:
            return None
        opening_id = self._tokenizer.token_to_id(reasoning.opening)
        return Preface(reasoning.all_closings(), reasoning.is_open, opening_id)

    def check_thinking(self, body: ChatCompletionRequest) -> None:
        """Raises ApiError (400) for a budget of reasoning that nothing could end."""
        if _limits_thinking(body) and not self.reads_reasoning:
            raise bad_request(
                "thinking_token_budget cannot be enforced: this server does not know what ends this model's "
                "reasoning. Start it with the --reasoning-parser of its model, or leave the field out",
                "thinking_token_budget",
                "unsupported_parameter",
            )

    def thinking_budget(
        self, body: ChatCompletionRequest, tools: RequestTools, prompt: RenderedPrompt
    ) -> ThinkingBudget | None:
        """The request's limit on reasoning; None if it has none, or there will be no reasoning."""
        tokens = body.thinking_token_budget
        if tokens is None or not _limits_thinking(body):
            return None
        calls: tuple[str, ...] = ()
        openings: tuple[str, ...] = (ANALYSIS,)
        closings: tuple[str, ...] = (END,)
        if self.is_harmony:
            is_open, repeats = self._harmony(prompt, reads_calls=False).place == "reasoning", True
        else:
            reasoning = self._reasoning(prompt)
            if reasoning is None or (reasoning.is_over and not reasoning.repeats):
                return None
            openings, closings = (reasoning.opening, *reasoning.other_openings), reasoning.all_closings()
            is_open, repeats = reasoning.is_open, reasoning.repeats
            calls = self.tool_parser.markers[:1] if tools.placed and self.tool_parser is not None else ()
        ids = self._tokenizer.encode(closings[0], add_special_tokens=False)
        return ThinkingBudget(tokens, openings, closings, tuple(ids), is_open, calls, repeats, prompt.text[-_BEGUN:])

    def frame(self, prompt: RenderedPrompt) -> Frame | None:
        """What a grammar has to put around content or calls, if an answer's text has more than these."""
        if self.is_harmony:
            return harmony_frame(self._harmony(prompt, reads_calls=False))
        tags = self._reasoning_parser.answer_tags if self._reasoning_parser is not None else ()
        return answer_frame(tags) if tags else None

    def calls(
        self, body: ChatCompletionRequest, tools: RequestTools
    ) -> tuple[StructuredOutput | Calls | None, Calls | None]:
        """The calls that an answer must consist of, and the calls that it may have instead of structured output.

        None where there are none. Raises ApiError (400).
        """
        if tools.demands_calls and self._gives_harmony_calls:
            return calls_in_format(tools, HarmonyToolParser), None
        schema = demanded_calls_schema(tools)
        if schema is not None:
            return json_schema_output(compact(schema), "tools"), None
        if not tools.placed or self.tool_parser is None or structured_output(body) is None:
            return None, None
        return None, calls_in_format(tools, self.tool_parser)

    def answer(self, body: ChatCompletionRequest, tools: RequestTools, prompt: RenderedPrompt) -> Answer:
        """What splits one choice of a request into pieces."""
        tool_parser, offered = None, tools.offered
        if self._gives_harmony_calls:
            pass  # which are messages beside others
        elif tools.demands_calls:
            tool_parser = demanded_calls_parser(tools, self.tool_parser)
        elif self.tool_parser is not None and offered:
            tool_parser = self.tool_parser(offered)
        harmony = self._harmony(prompt, reads_calls=bool(offered)) if self.is_harmony else None
        return Answer(
            self._tokenizer,
            harmony or self._reasoning(prompt, () if tools.demands_calls else offered),
            tool_parser,
            echo=prompt.spoken if body.echo else "",
            one_call=not tools.parallel,
            hide_reasoning=body.include_reasoning is False,
            chosen=tools.named is None,
            harmony_tokens=ReasoningTokens(self._tokenizer, harmony) if harmony and self.reads_reasoning else None,
        )

    def _harmony(self, prompt: RenderedPrompt, *, reads_calls: bool) -> HarmonyParser:
        return HarmonyParser(
            prompt.text,
            continues=prompt.continues,
            new_call_id=HarmonyToolParser.new_id if reads_calls and self._gives_harmony_calls else None,
            gives_reasoning=self.reads_reasoning,
        )

    def _reasoning(self, prompt: RenderedPrompt, tools: Sequence[Tool] = ()) -> ReasoningParser | None:
        """The parser of reasoning, which a call of one of `tools` may end."""
        if self._reasoning_parser is None:
            return None
        begun = prompt.spoken if prompt.continues else prompt.text
        watched = self.tool_parser if tools and self.tool_parser is not None and self.tool_parser.is_tagged else None
        calls = None if watched is None else watched(tools)
        return self._reasoning_parser(begun, continues=prompt.continues, calls=calls)

    def _special_tokens(self, tags: Iterable[str]) -> frozenset[int]:
        """The `tags` that are special tokens of the tokenizer."""
        token_ids = (self._tokenizer.token_to_id(tag) for tag in tags)
        return frozenset(i for i in token_ids if i is not None and self._tokenizer.is_special(i))


def _limits_thinking(body: ChatCompletionRequest) -> bool:
    return body.thinking_token_budget is not None and body.thinking_token_budget >= 0
