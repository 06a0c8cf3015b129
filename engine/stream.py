"""RequestStream: a request's outputs, pushed as they come. Lives on the event loop, as does everything in this file."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from .outputs import FinishReason, RequestOutput, TokenLogprob
from .transcript import Transcript

T_contra = TypeVar("T_contra", contravariant=True)


class Sink(Protocol[T_contra]):
    """Takes what is pushed, as it comes, on the event loop. A sink that has had enough for now pauses its source."""

    def push(self, item: T_contra, /) -> None:
        """Take what comes next. To raise ends it all, with what was raised as the failure."""
        ...

    def end(self, failure: Exception | None, /) -> None:
        """Nothing more comes: this was all, or there was a `failure`. It must not raise."""
        ...


class RequestStream:
    """The outputs of a request, for one reader. What is not pushed at once is merged, never lost.

    With log-probabilities nothing is merged: which of them are of the answer, and which of the reasoning before it, is
    known from the text that each token has given.

    It is read by a sink (`read`) or by `async for`.
    """

    __slots__ = ("_flows", "_on_abort", "_sink", "_waiting", "choices")

    def __init__(self, choices: list[Transcript], on_abort: Callable[[list[Transcript]], None]) -> None:
        self.choices = choices
        self._on_abort = on_abort
        self._waiting: deque[Transcript | RequestOutput] = deque()
        self._sink: Sink[RequestOutput] | None = None
        self._flows = False

    def read(self, sink: Sink[RequestOutput]) -> None:
        """Push to `sink` from the next `resume` on: first what waits, then each output as it comes, and the end."""
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

    def push(self, choice: Transcript, token: int, logprob: TokenLogprob | None) -> bool:
        """Add a token to a choice that goes on. Returns whether its text has ended the choice."""
        # The short way of most tokens. The device has filled the caches with weights since the last step, and each
        # object that a token passes by is a miss.
        if self._flows and (text := choice.plain.get(token)):
            choice.num_tokens += 1
            assert self._sink is not None, "nothing flows without a sink"
            try:
                self._sink.push(RequestOutput(choice.index, text, (token,), None, None, None, choice.num_cached_tokens))
            except Exception as failure:
                self._end(failure)
            return False
        stopped = choice.push(token, logprob)
        self.notify(choice)
        return stopped

    def notify(self, choice: Transcript) -> None:
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
        assert self._sink is not None, "nothing flows without a sink"
        try:
            self._sink.push(output)
        except Exception as failure:  # the reader's own, who is to hear of it
            self._end(failure)

    def _end_if_over(self) -> None:
        if self._flows and all(choice.finished for choice in self.choices):
            self._end(None)

    def _end(self, failure: Exception | None) -> None:
        sink, self._sink, self._flows = self._sink, None, False
        assert sink is not None, "nothing flows without a sink"
        sink.end(failure)

    def _take_first(self) -> RequestOutput:
        first = self._waiting.popleft()
        if isinstance(first, RequestOutput):
            return first
        first.is_waiting = False
        return first.take()


class OutputIterator:
    """A sink for `async for`: takes one output at a time, and leaves the rest to be merged."""

    def __init__(self, stream: RequestStream) -> None:
        self._stream = stream
        stream.read(self)
        self._next: asyncio.Future[RequestOutput] | None = None
        self._missed: RequestOutput | None = None  # came when the task that waited for it had been cancelled

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
