"""RequestStream: a request's outputs as they come. Lives on the event loop, as does everything in this file."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from .choice import Choice, Tap
from .outputs import FinishReason, RequestOutput

T = TypeVar("T")


class RequestStream:
    """An async iterator of RequestOutput, for one reader. What is not read at once is merged, never lost.

    With log-probabilities nothing is merged: which of them are of the answer, and which of the reasoning before it, is
    known from the text that each token has given.

    A reader that waits is handed the output itself, with no task or coroutine in between, and one that calls `forward`
    gets it as a function's argument. A tap, if it gives one, is handed text alone, for most tokens are no more: the
    device has filled the caches with weights since the last step, and each object that a token passes by is a miss.
    """

    __slots__ = ("_forwarded", "_on_abort", "_reader", "_ready", "_sink", "_tap", "choices")

    def __init__(self, choices: list[Choice], on_abort: Callable[[list[Choice]], None]) -> None:
        self.choices = choices
        self._on_abort = on_abort
        self._ready: deque[Choice | RequestOutput] = deque()
        self._reader: asyncio.Future[RequestOutput] | None = None
        self._sink: Callable[[RequestOutput], bool] | None = None
        self._tap: Callable[[int], Tap | None] | None = None
        self._forwarded: asyncio.Future[None] | None = None

    def __aiter__(self) -> RequestStream:
        return self

    def __anext__(self) -> asyncio.Future[RequestOutput]:
        future: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        if self._ready:
            future.set_result(self._take_first())
        elif self._is_over():
            future.set_exception(StopAsyncIteration())
        else:
            self._reader = future
        return future

    async def forward(self, sink: Callable[[RequestOutput], bool], tap: Callable[[int], Tap | None]) -> None:
        """Hand outputs to `sink` as they come, until it returns False or they end. Raises what `sink` raises.

        After an output `tap` is asked, by the choice's index, who takes the texts of tokens that say nothing else. That
        reader is as `sink`; None leaves all to `sink`.
        """
        while self._ready:
            if not sink(self._take_first()):
                return
        if self._is_over():
            return
        self._sink, self._forwarded, self._tap = sink, asyncio.get_running_loop().create_future(), tap
        try:
            await self._forwarded
        finally:
            self._stop_forwarding()

    def pass_on(self, choice: Choice, token: int) -> bool:
        """Hand a token's text to the choice's tap, if that is all there is to say of the token; whether it was."""
        tap = choice.tap
        if tap is None:
            return False
        text = choice.known_texts.get(token)
        if not text:
            choice.tap = None  # until it is certain again that no character is incomplete
            return False
        choice.num_tokens += 1
        self._hand(tap, text)
        return True

    def abort(self) -> None:
        """End all unfinished choices; each gives one last output that says so."""
        unfinished = [choice for choice in self.choices if not choice.finished]
        for choice in unfinished:
            choice.finish(FinishReason.ABORT)
            self.notify(choice)
        if unfinished:
            self._on_abort(unfinished)

    async def aclose(self) -> None:
        """Abort; nothing more will be read."""
        self.abort()
        self._ready.clear()

    def notify(self, choice: Choice) -> None:
        """Say that `choice` has something to take."""
        if self._sink is not None:
            self._hand(self._sink, choice.take())
            if choice.finished and self._is_over():
                self._stop_forwarding()
            elif self._tap is not None and choice.can_be_tapped:
                choice.tap = self._tap(choice.index)
            return
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # it is done if its task was cancelled
            reader.set_result(choice.take())
        elif choice.has_logprobs:
            self._ready.append(choice.take())
        elif not choice.is_queued:
            choice.is_queued = True
            self._ready.append(choice)

    def _hand(self, reader: Callable[[T], bool], what: T) -> None:
        try:
            goes_on = reader(what)
        except Exception as failure:  # the reader's, who is to hear of it
            self._stop_forwarding(failure)
            return
        if not goes_on:
            self._stop_forwarding()

    def _stop_forwarding(self, failure: Exception | None = None) -> None:
        self._sink = self._tap = None
        for choice in self.choices:
            choice.tap = None
        future = self._forwarded
        if future is None or future.done():
            return
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)

    def _take_first(self) -> RequestOutput:
        first = self._ready.popleft()
        if isinstance(first, RequestOutput):
            return first
        first.is_queued = False
        return first.take()

    def _is_over(self) -> bool:
        return all(choice.finished for choice in self.choices)
