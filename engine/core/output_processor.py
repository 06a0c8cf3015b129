"""OutputProcessor: turns the tokens of one choice of a request into text. Used on the event loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ..outputs import FinishReason, PromptLogprobs, RequestOutput, SequenceTimes, TokenLogprob
from ..sampling_params import SamplingParams
from ..sequences.beam_search import Hypothesis
from ..text.detokenizer import Detokenizer
from ..text.stop_strings import StopStrings

logger = logging.getLogger(__name__)

_NOTHING: Mapping[int, str] = {}


class OutputProcessor:
    """Turns the tokens of one choice into text, and gathers what has not been taken yet.

    `plain` maps tokens to their text, for tokens that add this text and nothing else. Such a token need not be pushed:
    it is enough to count it in `num_tokens`. `plain` is valid until the next `push`.
    """

    __slots__ = (
        "_detokenizer",
        "_error",
        "_finish_reason",
        "_known",
        "_logprobs",
        "_min_tokens",
        "_prompt_logprobs",
        "_show_stop_token",
        "_stop_reason",
        "_stops",
        "_text",
        "_token_ids",
        "finished",
        "has_logprobs",
        "index",
        "is_waiting",
        "key",
        "num_cached_tokens",
        "num_preemptions",
        "num_tokens",
        "plain",
        "times",
    )

    def __init__(self, key: int, index: int, sampling: SamplingParams, detokenizer: Detokenizer) -> None:
        self.key = key
        self.index = index
        self.finished = False
        self.is_waiting = False  # to be taken, in the stream's queue
        self.has_logprobs = sampling.logprobs is not None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_tokens = 0
        self.plain = _NOTHING
        self.times: SequenceTimes | None = None  # known from its first token on
        self._detokenizer = detokenizer
        self._known = _NOTHING if self.has_logprobs or sampling.stop else detokenizer.known
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

    def push(self, token: int, logprob: TokenLogprob | None, *, ends: bool = False) -> bool:
        """Add a token. `ends`: it is a stop token. Returns whether its text has ended the choice."""
        self._token_ids.append(token)
        self.num_tokens += 1
        if logprob is not None and self._logprobs is not None:
            self._logprobs.append(logprob)
        if not ends or self._show_stop_token:
            try:
                self._show(self._detokenizer.push(token))
            except Exception as error:
                self._break(error)
        self.plain = self._known if self._detokenizer.is_whole else _NOTHING
        return self.finished

    def push_all(self, hypothesis: Hypothesis) -> None:
        """Add all tokens of a beam that was among the best."""
        last = len(hypothesis.token_ids) - 1
        for i, token in enumerate(hypothesis.token_ids):
            logprob = hypothesis.logprobs[i] if hypothesis.logprobs else None
            if self.push(token, logprob, ends=i == last and hypothesis.finish_reason is FinishReason.STOP):
                return

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None, error: str | None = None) -> None:
        """Add the text that was held back, and end the choice, unless it has already ended."""
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
        """End with an error, so that one request's faulty text does not affect the others."""
        logger.error("The tokens of a request cannot be turned into text", exc_info=error)
        self._end(FinishReason.ERROR, None, f"the tokens cannot be turned into text: {error}")

    def _end(self, reason: FinishReason, stop_reason: str | int | None, error: str | None) -> None:
        self.finished = True
        self._finish_reason, self._stop_reason, self._error = reason, stop_reason, error
