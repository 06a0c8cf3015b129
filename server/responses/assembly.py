"""Turns what the model writes into the items of a response, and into the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from tidewheel.engine.outputs import RequestOutput

from ..chat.pieces import CallStart
from ..chat.pieces import Reasoning as ReasoningPiece
from ..chat.run import ChoiceDelta
from ..chat.sealed_reasoning import seal_reasoning
from ..errors import ApiError
from ..ids import new_id
from ..protocol.chat import ChatLogprobs
from ..protocol.response_events import (
    ContentPartAdded,
    ContentPartDone,
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
)
from ..protocol.response_items import (
    ID_PREFIXES,
    CustomToolCall,
    FunctionCall,
    Item,
    Message,
    OutputItem,
    OutputText,
    Reasoning,
    ReasoningText,
    Status,
)
from ..protocol.response_tools import BuiltInTool
from ..protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from ..protocol.usage import Usage
from .built_in_tools import call_of
from .custom_input import CustomInput
from .offered_tools import OfferedTools

_RESPONSE_PREFIX = "resp_"
_HEX_DIGITS = 32  # of a UUID


def new_item_id(item_type: type[Item]) -> str:
    """An id for an item of a request."""
    return f"{ID_PREFIXES[item_type]}_{new_id()}"


def new_response_id() -> str:
    """An id for a response, which the ids of its own items have in them: see `response_of_item`."""
    return f"{_RESPONSE_PREFIX}{new_id()}"


def response_of_item(item_id: str) -> str:
    """The id of the response that an item is of, if the item was made here."""
    return _RESPONSE_PREFIX + item_id.partition("_")[2][:_HEX_DIGITS]


class ResponseBuilder:
    """Builds `response` from an answer. Each method returns the events of what it did.

    Events are made as they are read, and show the response as it is then. `logprobs_of` shapes log-probabilities.
    `tools` are those that may be called. `encrypts_reasoning` asks for reasoning as `encrypted_content` too.
    """

    def __init__(
        self,
        response: Response,
        logprobs_of: Callable[[RequestOutput], ChatLogprobs | None],
        *,
        tools: OfferedTools,
        encrypts_reasoning: bool = False,
    ) -> None:
        self.response = response
        self._logprobs_of = logprobs_of
        self._tools = tools
        self._encrypts_reasoning = encrypts_reasoning
        self._numbers = count()
        self._item: OutputItem | None = None
        self._item_id = ""
        self._built_in: BuiltInTool | None = None  # the tool that the open item calls, which is shown when it is whole
        self._texts: list[str] = []
        self._input = CustomInput()
        self._logprobs: list[Any] = []
        self._awaited_logprobs: list[Any] = []  # of tokens whose text is not certain yet
        self._finish_reason: str | None = None

    def begin(self) -> Iterator[ResponseEvent]:
        """The response is accepted."""
        yield ResponseCreated(next(self._numbers), self.response)
        if self.response.status == "queued":
            yield ResponseQueued(next(self._numbers), self.response)
        else:
            yield ResponseInProgress(next(self._numbers), self.response)

    def push(self, delta: ChoiceDelta) -> Iterator[ResponseEvent]:
        """More of the answer."""
        if self.response.status == "queued":
            self.response.status = "in_progress"
            yield ResponseInProgress(next(self._numbers), self.response)
        self._finish_reason = delta.finish_reason
        if delta.output.logprobs is not None:
            self._await_logprobs(delta.output)
        for piece in delta.pieces:
            if isinstance(piece, str):
                yield from self._add_text(piece)
                continue
            self._awaited_logprobs.clear()
            if isinstance(piece, ReasoningPiece):
                yield from self._add_reasoning(piece.text)
            elif isinstance(piece, CallStart):
                yield from self._begin_call(piece)
            elif isinstance(self._item, CustomToolCall):
                yield from self._add_input(self._input.feed(piece.text))
            else:
                self._texts.append(piece.text)
                if self._built_in is None:
                    yield FunctionCallArgumentsDelta(next(self._numbers), self._item_id, self._index, piece.text)

    def finish(self, usage: Usage) -> Iterator[ResponseEvent]:
        """The answer has ended as the last delta said."""
        response = self.response
        if self._item is None:
            yield from self._open(Message(role="assistant", content=[]))
        response.usage = _usage(usage)
        if self._finish_reason == "length":
            yield from self._close("incomplete")
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
            yield ResponseIncomplete(next(self._numbers), response)
        else:
            yield from self._close("completed")
            response.status = "completed"
            response.completed_at = int(time.time())
            yield ResponseCompleted(next(self._numbers), response)

    def fail(self, error: ApiError) -> Iterator[ResponseEvent]:
        """The answer broke off."""
        self.response.status = "failed"
        self.response.error = ResponseError(
            "rate_limit_exceeded" if error.status == 429 else "server_error", error.message
        )
        yield ResponseFailed(next(self._numbers), self.response)

    @property
    def _index(self) -> int:
        """The open item's place in the output."""
        return len(self.response.output)

    def _add_text(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._item, Message):
            yield from self._open(Message(role="assistant", content=[]))
        logprobs, self._awaited_logprobs = self._awaited_logprobs, []
        self._texts.append(text)
        self._logprobs += logprobs
        yield OutputTextDelta(next(self._numbers), self._item_id, self._index, 0, text, logprobs)

    def _add_reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._item, Reasoning):
            yield from self._open(Reasoning(content=[]))
        self._texts.append(text)
        yield ReasoningTextDelta(next(self._numbers), self._item_id, self._index, 0, text)

    def _add_input(self, text: str) -> Iterator[ResponseEvent]:
        if text:
            yield CustomToolCallInputDelta(next(self._numbers), self._item_id, self._index, text)

    def _begin_call(self, start: CallStart) -> Iterator[ResponseEvent]:
        item = self._tools.call(start)
        built_in = self._tools.built_in(start.name)
        if built_in is None:
            yield from self._open(item)
            return
        if self._item is not None:
            yield from self._close("completed")
        self._item, self._built_in, self._texts = item, built_in, []

    def _show_built_in(self, tool: BuiltInTool, status: Status) -> Iterator[ResponseEvent]:
        """A call that is cut off or incomplete is shown as a function's call, so that clients do not run it."""
        call, text = self._item, "".join(self._texts)
        assert isinstance(call, FunctionCall), "a function stands for the tool"
        self._item = self._built_in = None
        built_in = call_of(tool, call.call_id, text) if status == "completed" else None
        yield from self._open(built_in or call)
        if built_in is None:
            self._texts.append(text)
            yield FunctionCallArgumentsDelta(next(self._numbers), self._item_id, self._index, text)

    def _await_logprobs(self, output: RequestOutput) -> None:
        logprobs = self._logprobs_of(output)
        if logprobs is not None:
            self._awaited_logprobs += logprobs.content

    def _open(self, item: OutputItem) -> Iterator[ResponseEvent]:
        if self._item is not None:
            yield from self._close("completed")
        of_response = self.response.id.removeprefix(_RESPONSE_PREFIX)
        self._item_id = item.id = f"{ID_PREFIXES[type(item)]}_{of_response}{self._index:04x}"
        item.status = "in_progress"
        self._item = item
        self._texts = []
        self._input = CustomInput()
        self._logprobs = []
        yield OutputItemAdded(next(self._numbers), self._index, item)
        if isinstance(item, Message | Reasoning):
            part = OutputText("") if isinstance(item, Message) else ReasoningText("")
            yield ContentPartAdded(next(self._numbers), self._item_id, self._index, 0, part)

    def _close(self, status: Status) -> Iterator[ResponseEvent]:
        if self._built_in is not None:
            yield from self._show_built_in(self._built_in, status)
        item, item_id, index, text = self._item, self._item_id, self._index, "".join(self._texts)
        assert item is not None, "only an item that was opened is closed"
        item.status = status
        if isinstance(item, FunctionCall):
            item.arguments = text
            yield FunctionCallArgumentsDone(next(self._numbers), item_id, index, item.name, text)
        elif isinstance(item, CustomToolCall):
            yield from self._add_input(self._input.finish())
            item.input = self._input.text
            yield CustomToolCallInputDone(next(self._numbers), item_id, index, item.input)
        elif isinstance(item, Message):
            part = OutputText(text, logprobs=self._logprobs)
            item.content = [part]
            yield OutputTextDone(next(self._numbers), item_id, index, 0, text, self._logprobs)
            yield ContentPartDone(next(self._numbers), item_id, index, 0, part)
        elif isinstance(item, Reasoning):
            thought = ReasoningText(text)
            item.content = [thought]
            if self._encrypts_reasoning:
                item.encrypted_content = seal_reasoning(text)
            yield ReasoningTextDone(next(self._numbers), item_id, index, 0, text)
            yield ContentPartDone(next(self._numbers), item_id, index, 0, thought)
        self._item = None
        yield OutputItemDone(next(self._numbers), index, item)
        self.response.output.append(item)


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(details.reasoning_tokens if details else 0),
        usage.total_tokens,
    )
