"""RequestStream: pushes a request's outputs as they come. Everything in this file is used on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from ..outputs import FinishReason, RequestOutput, TokenLogprob
from .output_processor import OutputProcessor

T_contra = TypeVar("T_contra", contravariant=True)


class Sink(Protocol[T_contra]):
    """Takes items as they are pushed, on the event loop. A sink that cannot take more for now pauses its source."""

    def push(self, item: T_contra, /) -> None:
        """Take the next item. If this raises, nothing more is pushed, and `end` is called with the exception."""
        ...

    def end(self, failure: Exception | None, /) -> None:
        """Note that nothing more comes: all items were pushed, or there was a `failure`. Must not raise."""
        ...


class RequestStream:
    """The outputs of a request, for one reader: a sink (`read`) or `async for`.

    Outputs that cannot be pushed at once are merged, never lost. Outputs with log-probabilities are not merged: the
    text of each token is needed to tell the answer's tokens from those of the reasoning before it.
    """

    __slots__ = ("_flows", "_on_abort", "_sink", "_waiting", "choices")

    def __init__(self, choices: list[OutputProcessor], on_abort: Callable[[list[OutputProcessor]], None]) -> None:
        self.choices = choices
        self._on_abort = on_abort
        self._waiting: deque[OutputProcessor | RequestOutput] = deque()
        self._sink: Sink[RequestOutput] | None = None
        self._flows = False

    def read(self, sink: Sink[RequestOutput]) -> None:
        """Push to `sink` from the next `resume` on: first the waiting outputs, then each new one, then the end."""
        self._sink = sink

    def pause(self) -> None:
        """Push nothing until `resume`."""
        self._flows = False

    def resume(self) -> None:
        """Go on pushing. Does nothing without a sink, and after the end."""
        self._flows = self._sink is not None
        while self._waiting and self._flows:
            self._hand_over(self._take_first())
        self._end_if_over()

    def __aiter__(self) -> OutputIterator:
        return OutputIterator(self)

    def abort(self) -> None:
        """End all unfinished choices; each gives one last output that says so."""
        unfinished = [choice for choice in self.choices if not choice.finished]
        for choice in unfinished:
            choice.finish(FinishReason.ABORT)
            self.notify(choice)
        if unfinished:
            self._on_abort(unfinished)

    def push(self, choice: OutputProcessor, token: int, logprob: TokenLogprob | None) -> bool:
        """Add a token to a choice that goes on. Returns whether its text has ended the choice."""
        # The short way that most tokens take. The last step has filled the processor's caches with weights, so each
        # object that a token needs is a cache miss.
        if self._flows and (text := choice.plain.get(token)):
            choice.num_tokens += 1
            assert self._sink is not None, "a stream needs a sink before it can deliver"
            try:
                self._sink.push(RequestOutput(choice.index, text, (token,), None, None, None, choice.num_cached_tokens))
            except Exception as failure:
                self._end(failure)
            return False
        stopped = choice.push(token, logprob)
        self.notify(choice)
        return stopped

    def notify(self, choice: OutputProcessor) -> None:
        """Say that `choice` has something to take."""
        if self._flows:
            self._hand_over(choice.take())
            if choice.finished:
                self._end_if_over()
        elif choice.has_logprobs:
            self._waiting.append(choice.take())
        elif not choice.is_waiting:
            choice.is_waiting = True
            self._waiting.append(choice)

    def _hand_over(self, output: RequestOutput) -> None:
        assert self._sink is not None, "a stream needs a sink before it can deliver"
        try:
            self._sink.push(output)
        except Exception as failure:  # the reader's own; the reader gets it
            self._end(failure)

    def _end_if_over(self) -> None:
        if self._flows and all(choice.finished for choice in self.choices):
            self._end(None)

    def _end(self, failure: Exception | None) -> None:
        sink, self._sink, self._flows = self._sink, None, False
        assert sink is not None, "a stream needs a sink before it can deliver"
        sink.end(failure)

    def _take_first(self) -> RequestOutput:
        first = self._waiting.popleft()
        if isinstance(first, RequestOutput):
            return first
        first.is_waiting = False
        return first.take()


class OutputIterator:
    """A sink for `async for`. It takes one output at a time, and lets the others be merged."""

    def __init__(self, stream: RequestStream) -> None:
        self._stream = stream
        stream.read(self)
        self._next: asyncio.Future[RequestOutput] | None = None
        self._missed: RequestOutput | None = None  # it came after the waiting task had been cancelled

    def __aiter__(self) -> OutputIterator:
        return self

    def __anext__(self) -> asyncio.Future[RequestOutput]:
        self._next = asyncio.get_running_loop().create_future()
        missed, self._missed = self._missed, None
        if missed is None:
            self._stream.resume()
        else:
            self._next.set_result(missed)
        return self._next

    def push(self, output: RequestOutput) -> None:
        """See Sink."""
        self._stream.pause()
        if self._next is None or self._next.done():
            self._missed = output
        else:
            self._next.set_result(output)

    def end(self, failure: Exception | None) -> None:
        """See Sink."""
        if self._next is not None and not self._next.done():
            self._next.set_exception(failure or StopAsyncIteration())
