"""Turns what the model writes into the blocks of a message, and into the events of its stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from ..chat.pieces import CallStart, Reasoning
from ..chat.run import ChoiceDelta
from ..chat.sealed_reasoning import seal_reasoning
from ..chat.tools.arguments import arguments_object
from ..ids import new_id
from ..protocol.message_answers import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputBlock,
    OutputMessage,
    Ping,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextDelta,
    ThinkingDelta,
    TokensDetails,
)
from ..protocol.messages import TextBlock, ThinkingBlock, ToolUseBlock
from ..protocol.usage import Usage


class MessageBuilder:
    """Builds a message from an answer. Each method returns the events of what it did, which are made as they are read.

    `usage` counts the tokens so far, and `max_tokens` is the most there may be. Without `shows_thinking`, only the
    signature of the thoughts is sent.
    """

    def __init__(self, model: str, usage: Callable[[], Usage], max_tokens: int, *, shows_thinking: bool = True) -> None:
        self._usage = usage
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self.message = OutputMessage(id=f"msg_{new_id()}", model=model, content=[], usage=_message_usage(usage()))
        self._has_begun = False
        self._block: OutputBlock | None = None
        self._texts: list[str] = []
        self._end: ChoiceDelta | None = None

    def push(self, delta: ChoiceDelta) -> Iterator[MessageEvent]:
        """More of the answer."""
        if not self._has_begun:
            # Not before, as only now it is known how much of the prompt was found in the cache.
            self._has_begun = True
            self.message.usage = _message_usage(self._usage())
            yield MessageStart(self.message)
        if delta.finish_reason is not None:
            self._end = delta
        for piece in delta.pieces:
            if isinstance(piece, str):
                if not isinstance(self._block, TextBlock):
                    yield from self._open(TextBlock(""))
                yield self._delta(piece, TextDelta(piece))
            elif isinstance(piece, Reasoning):
                if not isinstance(self._block, ThinkingBlock):
                    yield from self._open(ThinkingBlock("", ""))
                event = self._delta(piece.text, ThinkingDelta(piece.text))
                if self._shows_thinking:
                    yield event
            elif isinstance(piece, CallStart):
                yield from self._open(ToolUseBlock(piece.id, piece.name, {}))
            else:
                yield self._delta(piece.text, InputJsonDelta(piece.text))

    def finish(self) -> Iterator[MessageEvent]:
        """The answer has ended as the last delta said."""
        message = self.message
        if self._block is not None:
            yield from self._close(self._block)
        message.usage = _message_usage(self._usage())
        message.stop_reason, message.stop_sequence = self._stop()
        yield MessageDelta(StopDelta(message.stop_reason, message.stop_sequence), message.usage)
        yield MessageStop()

    def _delta(
        self, text: str, delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta
    ) -> ContentBlockDelta:
        self._texts.append(text)
        return ContentBlockDelta(len(self.message.content), delta)

    def _open(self, block: OutputBlock) -> Iterator[MessageEvent]:
        if self._block is not None:
            yield from self._close(self._block)
        self._block = block
        self._texts = []
        yield ContentBlockStart(len(self.message.content), block)
        if not self.message.content:
            yield Ping()

    def _close(self, block: OutputBlock) -> Iterator[MessageEvent]:
        index, text = len(self.message.content), "".join(self._texts)
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ToolUseBlock):
            block.input = arguments_object(text)
        else:
            block.thinking = text if self._shows_thinking else ""
            block.signature = seal_reasoning(text)
            yield ContentBlockDelta(index, SignatureDelta(block.signature))
        self._block = None
        yield ContentBlockStop(index)
        self.message.content.append(block)

    def _stop(self) -> tuple[StopReason, str | None]:
        assert self._end is not None, "an answer's last delta has a finish reason"
        if self._end.finish_reason == "length":
            whole = self.message.usage.output_tokens >= self._max_tokens
            return ("max_tokens" if whole else "model_context_window_exceeded"), None
        if isinstance(self._end.output.stop_reason, str):
            return "stop_sequence", self._end.output.stop_reason
        calls = any(isinstance(block, ToolUseBlock) for block in self.message.content)
        return ("tool_use" if calls else "end_turn"), None


def _message_usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    details = usage.completion_tokens_details
    return MessageUsage(
        usage.prompt_tokens - cached,
        0,
        cached,
        usage.completion_tokens,
        msgspec.UNSET if details is msgspec.UNSET else TokensDetails(details.reasoning_tokens),
    )
