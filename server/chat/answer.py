"""One choice on its way from the model's text to pieces: content, reasoning, tool calls, and why it ended."""

from __future__ import annotations

from tidewheel.engine.outputs import FinishReason, RequestOutput
from tidewheel.engine.text.tokenizer import Tokenizer

from .harmony import HarmonyParser, ReasoningTokens
from .pieces import CallArguments, CallStart, Piece, Reasoning
from .reasoning import ReasoningParser, count_reasoning_tokens
from .tools.json_scanner import is_json
from .tools.parser import ToolCallParser


class Answer:
    """Splits the outputs of one choice into pieces. Tool calls are looked for outside the reasoning. Without parsers,
    all text is content.

    `echo` is text that goes before the answer. With `one_call`, calls after the first are dropped. `hide_reasoning`
    keeps the reasoning from the pieces. A call that was not `chosen` by the model does not change the finish reason.
    Neither does one that a stop string or token breaks off. A HarmonyParser finds calls too. Its reasoning is counted
    by `harmony_tokens`.
    """

    __slots__ = (
        "_chosen",
        "_echo",
        "_harmony_tokens",
        "_has_calls",
        "_hide_reasoning",
        "_last_arguments",
        "_one_call",
        "_reasoning_ids",
        "_reasoning_parser",
        "_reasoning_tokens",
        "_tokenizer",
        "_tool_parser",
        "finish_reason",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        reasoning_parser: ReasoningParser | HarmonyParser | None = None,
        tool_parser: ToolCallParser | None = None,
        *,
        echo: str = "",
        one_call: bool = False,
        hide_reasoning: bool = False,
        chosen: bool = True,
        harmony_tokens: ReasoningTokens | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._reasoning_parser = reasoning_parser
        self._tool_parser = tool_parser
        self._echo = echo
        self._one_call = one_call
        self._hide_reasoning = hide_reasoning
        self._chosen = chosen
        self._harmony_tokens = harmony_tokens
        self._has_calls = False
        self._last_arguments: list[str] = []
        self._reasoning_ids: list[int] = []
        self._reasoning_tokens = 0
        self.finish_reason: str | None = None

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens so far were reasoning."""
        if self._harmony_tokens is not None:
            return self._harmony_tokens.count
        if self._reasoning_parser is not None and self._reasoning_parser.has_reasoned:
            return len(self._reasoning_ids)
        return self._reasoning_tokens

    def push(self, output: RequestOutput) -> list[Piece]:
        """The pieces that `output` has made certain. The last output also sets `finish_reason`."""
        if self._reasoning_parser is None and self._tool_parser is None:
            pieces: list[Piece] = [output.text] if output.text else []
        else:
            pieces = self._split(output)
        if self._echo:
            pieces.insert(0, self._echo)
            self._echo = ""
        if output.finish_reason is not None:
            stopped_to_call = self._has_calls and self._chosen and output.finish_reason is FinishReason.STOP
            if stopped_to_call and output.stop_reason is not None:  # which may stand within a call
                stopped_to_call = is_json("".join(self._last_arguments))
            self.finish_reason = "tool_calls" if stopped_to_call else output.finish_reason.value
        return pieces

    def _split(self, output: RequestOutput) -> list[Piece]:
        pieces: list[Piece] = []
        for part in self._without_reasoning(output):
            if isinstance(part, str) and self._tool_parser is not None:
                pieces += self._tool_parser.feed(part)
            elif not (self._hide_reasoning and isinstance(part, Reasoning)):
                pieces.append(part)
        if output.finish_reason is not None and self._tool_parser is not None:
            pieces += self._tool_parser.finish(cut_off=_is_cut_off(output))
        for piece in pieces:
            if isinstance(piece, CallStart):
                self._has_calls, self._last_arguments = True, []
            elif isinstance(piece, CallArguments):
                self._last_arguments.append(piece.text)
        if self._one_call:
            pieces = [p for p in pieces if not (isinstance(p, CallStart | CallArguments) and p.index > 0)]
        return pieces

    def _without_reasoning(self, output: RequestOutput) -> list[Piece]:
        """The output's text, with the reasoning in it made pieces of its own."""
        parser = self._reasoning_parser
        if parser is None:
            return [output.text] if output.text else []
        parts = parser.feed(output.text)
        if output.finish_reason is not None:
            parts += parser.finish(cut_off=_is_cut_off(output))
        if isinstance(parser, HarmonyParser):
            if self._harmony_tokens is not None:
                self._harmony_tokens.push(output.token_ids)
            return parts
        self._reasoning_ids += output.token_ids
        if parser.is_done or output.finish_reason is not None:
            if parser.has_reasoned:
                self._reasoning_tokens = count_reasoning_tokens(
                    self._reasoning_ids, parser.closed_by, self._tokenizer, parser.ended_by
                )
            self._reasoning_parser = None
            self._reasoning_ids = []
        return parts


def _is_cut_off(output: RequestOutput) -> bool:
    """Whether something else than the model has ended a choice: its length, or a stop string."""
    return output.finish_reason is FinishReason.LENGTH or isinstance(output.stop_reason, str)
