"""RequestStream: a request's outputs as they come. Lives on the event loop, as does everything in this file."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from tidewheel.engine.beam_search import Hypothesis
from tidewheel.engine.detokenizer import Detokenizer
from tidewheel.engine.request import (
    FinishReason,
    PromptLogprobs,
    RequestOutput,
    SamplingParams,
    SequenceTimes,
    TokenLogprob,
)
from tidewheel.engine.stop_strings import StopStrings

logger = logging.getLogger(__name__)


class Choice:
    """One choice of a request: turns its tokens into text, and gathers what has not been read yet."""

    def __init__(self, key: int, index: int, sampling: SamplingParams, detokenizer: Detokenizer) -> None:
        self.key = key
        self.index = index
        self.finished = False
        self.is_queued = False  # for the stream's reader
        self.has_logprobs = sampling.logprobs is not None
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self.times: SequenceTimes | None = None  # known from its first token on
        self._detokenizer = detokenizer
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None
        self._min_tokens = sampling.min_tokens
        self._show_stop_token = sampling.include_stop_str_in_output
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = [] if self.has_logprobs else None
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._error: str | None = None

    def push_prompt(self, logprobs: PromptLogprobs) -> None:
        """Add the log-probabilities of the next tokens of the prompt."""
        self._prompt_logprobs.append(logprobs)

    def push(self, token: int, logprob: TokenLogprob | None, *, ends: bool) -> bool:
        """Add a token; `ends` says it is one that stops the choice. Returns whether its text has ended the choice."""
        self._token_ids.append(token)
        self.num_tokens += 1
        if logprob is not None and self._logprobs is not None:
            self._logprobs.append(logprob)
        if not ends or self._show_stop_token:
            try:
                self._show(self._detokenizer.push(token))
            except Exception as error:
                self._break(error)
        return self.finished

    def push_all(self, hypothesis: Hypothesis) -> None:
        """Add all tokens of a beam that has won."""
        last = len(hypothesis.token_ids) - 1
        for i, token in enumerate(hypothesis.token_ids):
            logprob = hypothesis.logprobs[i] if hypothesis.logprobs else None
            if self.push(token, logprob, ends=i == last and hypothesis.finish_reason is FinishReason.STOP):
                return

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None, error: str | None = None) -> None:
        """End the choice, with the text that was held back, unless it has already ended."""
        try:
            self._show("" if self.finished else self._detokenizer.flush())
        except Exception as text_error:
            self._break(text_error)
        if not self.finished:
            if self._stops is not None:
                self._text += self._stops.flush()
            self._end(reason, stop_reason, error)

    def take(self) -> RequestOutput:
        """Everything since the last output."""
        output = RequestOutput(
            self.index,
            self._text,
            self._token_ids,
            self._logprobs,
            self._finish_reason,
            self._stop_reason,
            self.num_cached_tokens,
            self._error,
            PromptLogprobs.join(self._prompt_logprobs) if self._prompt_logprobs else None,
        )
        self._text, self._token_ids = "", []
        if self._logprobs is not None:
            self._logprobs = []
        if self._prompt_logprobs:
            self._prompt_logprobs = []
        return output

    def _show(self, piece: str) -> None:
        if self._stops is None or self.num_tokens <= self._min_tokens:
            self._text += piece
        elif piece:
            shown, stop = self._stops.push(piece)
            self._text += shown
            if stop is not None:
                self._end(FinishReason.STOP, stop, None)

    def _break(self, error: Exception) -> None:
        """End with an error: trouble with one request's text must not reach the others."""
        logger.error("The text of a request cannot be made", exc_info=error)
        self._end(FinishReason.ERROR, None, f"the tokens cannot be turned into text: {error}")

    def _end(self, reason: FinishReason, stop_reason: str | int | None, error: str | None) -> None:
        self.finished = True
        self._finish_reason, self._stop_reason, self._error = reason, stop_reason, error


class RequestStream:
    """An async iterator of RequestOutput, for one reader. What is not read at once is merged, never lost.

    With log-probabilities nothing is merged: which of them are of the answer, and which of the reasoning before it, is
    known from the text that each token has given.

    A reader that waits is handed the output itself, with no task or coroutine in between, and one that calls `forward`
    gets it as a function's argument: most tokens go that way.
    """

    def __init__(self, choices: list[Choice], on_abort: Callable[[list[Choice]], None]) -> None:
        self.choices = choices
        self._on_abort = on_abort
        self._ready: deque[Choice | RequestOutput] = deque()
        self._reader: asyncio.Future[RequestOutput] | None = None
        self._sink: Callable[[RequestOutput], bool] | None = None
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

    async def forward(self, sink: Callable[[RequestOutput], bool]) -> None:
        """Hand outputs to `sink` as they come, until it returns False or they end. Raises what `sink` raises."""
        while self._ready:
            if not sink(self._take_first()):
                return
        if self._is_over():
            return
        self._sink, self._forwarded = sink, asyncio.get_running_loop().create_future()
        try:
            await self._forwarded
        finally:
            self._sink = None

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
            self._feed(self._sink, choice)
            return
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # it is done if its task was cancelled
            reader.set_result(choice.take())
        elif choice.has_logprobs:
            self._ready.append(choice.take())
        elif not choice.is_queued:
            choice.is_queued = True
            self._ready.append(choice)

    def _feed(self, sink: Callable[[RequestOutput], bool], choice: Choice) -> None:
        future = self._forwarded
        assert future is not None
        try:
            goes_on = sink(choice.take())
        except Exception as failure:  # the reader's, who is to hear of it
            self._sink = None
            if not future.done():
                future.set_exception(failure)
            return
        if not goes_on or (choice.finished and self._is_over()):
            self._sink = None
            if not future.done():
                future.set_result(None)

    def _take_first(self) -> RequestOutput:
        first = self._ready.popleft()
        if isinstance(first, RequestOutput):
            return first
        first.is_queued = False
        return first.take()

    def _is_over(self) -> bool:
        return all(choice.finished for choice in self.choices)
