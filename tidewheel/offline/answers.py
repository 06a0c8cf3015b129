"""The engine's outputs, piece by piece, as answers in vLLM's shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from tidewheel.engine.core.stream import RequestStream
from tidewheel.engine.outputs import FinishReason, PromptLogprobs, TokenLogprob
from tidewheel.engine.outputs import RequestOutput as EngineOutput
from tidewheel.engine.text.tokenizer import Tokenizer

from .lora_request import LoRARequest
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from .prompts import EncodedPrompt

_REMEMBERED_TOKENS = 65536


class TokenNames:
    """The texts of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text: Callable[[int], str | None] = lambda token: None
        if tokenizer.has_text:
            self._text = lru_cache(_REMEMBERED_TOKENS)(lambda token: tokenizer.decode([token], False))

    def entry(self, token: int, logprob: float, rank: int | None, top: Iterable[tuple[int, float]]) -> TokenLogprobs:
        """One place's log-probabilities: of the token there, then of the `top` ones, likeliest first."""
        likely = {other: Logprob(value, i, self._text(other)) for i, (other, value) in enumerate(top, 1)}
        if token in likely:
            rank = likely[token].rank
        return {token: Logprob(logprob, rank, self._text(token)), **likely}

    def of_prompt(self, token_ids: Sequence[int], scored: PromptLogprobs) -> list[TokenLogprobs | None]:
        """An entry for each token of a prompt; the first one has none."""
        entries: list[TokenLogprobs | None] = [None]
        for i, token in enumerate(token_ids[1:]):
            top = zip(scored.top_ids[i].tolist(), scored.top_logprobs[i].tolist(), strict=True)
            entries.append(self.entry(token, float(scored.logprobs[i]), int(scored.ranks[i]), top))
        return entries


class _Choice:
    """What there is of one answer."""

    __slots__ = ("cumulative", "last", "logprobs", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.cumulative: float | None = None
        self.last: EngineOutput | None = None

    def add(self, output: EngineOutput) -> None:
        self.texts.append(output.text)
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs += output.logprobs
            self.cumulative = sum((one.logprob for one in output.logprobs), self.cumulative or 0.0)
        self.last = output


class Answers:
    """Gathers the answers to one prompt. `add` takes the engine's outputs, and `output` gives all that they say.

    Without `detokenize` answers have no text. `lora_request` is the adapter that they come from.
    """

    __slots__ = (
        "_arrival",
        "_choices",
        "_detokenize",
        "_lora_request",
        "_names",
        "_num_open",
        "_prompt",
        "_prompt_logprobs",
        "_request_id",
        "_stream",
    )

    def __init__(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        stream: RequestStream,
        names: TokenNames,
        *,
        detokenize: bool,
        lora_request: LoRARequest | None = None,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._stream = stream
        self._names = names
        self._detokenize = detokenize
        self._lora_request = lora_request
        self._arrival = time.time()
        self._choices = [_Choice() for _ in stream.choices]
        self._num_open = len(self._choices)
        self._prompt_logprobs: PromptLogprobs | None = None

    @property
    def finished(self) -> bool:
        """Whether all answers are complete."""
        return not self._num_open

    def add(self, output: EngineOutput) -> None:
        """Take in what a step added to an answer."""
        self._choices[output.index].add(output)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            self._num_open -= 1

    def output(self, indices: Sequence[int] | None = None, *, as_delta: bool = False) -> RequestOutput:
        """All answers so far, or those at `indices`; with `as_delta` what was added to them since the last call."""
        wanted = range(len(self._choices)) if indices is None else indices
        output = self._request_output(wanted)
        if as_delta:
            for choice in (self._choices[index] for index in wanted):
                choice.texts, choice.token_ids, choice.logprobs = [], [], []
        return output

    def _request_output(self, indices: Iterable[int]) -> RequestOutput:
        token_ids, scored = self._prompt.token_ids, self._prompt_logprobs
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt.text,
            prompt_token_ids=token_ids,
            prompt_logprobs=None if scored is None else self._names.of_prompt(token_ids, scored),
            outputs=[self._completion(index) for index in indices],
            finished=self.finished,
            metrics=self._metrics() if self.finished else None,
            lora_request=self._lora_request,
            num_cached_tokens=max(choice.num_cached_tokens for choice in self._stream.choices),
        )

    def _completion(self, index: int) -> CompletionOutput:
        choice = self._choices[index]
        text = "".join(choice.texts) if self._detokenize else ""
        completion = CompletionOutput(index, text, [*choice.token_ids])
        completion.lora_request = self._lora_request
        if choice.cumulative is not None:
            completion.cumulative_logprob = choice.cumulative
            completion.logprobs = [
                self._names.entry(token, one.logprob, None, one.top)
                for token, one in zip(choice.token_ids, choice.logprobs, strict=True)
            ]
        if choice.last is not None and choice.last.finish_reason is not None:
            reason = choice.last.finish_reason
            completion.finish_reason = (FinishReason.ERROR if reason is FinishReason.INVALID else reason).value
            completion.stop_reason, completion.error = choice.last.stop_reason, choice.last.error
        return completion

    def _metrics(self) -> RequestMetrics | None:
        times = self._stream.choices[0].times
        if times is None:
            return None
        count = sum(choice.num_tokens for choice in self._stream.choices)
        now = time.perf_counter()
        return RequestMetrics(self._arrival, times.queued, times.scheduled, times.first_token, now, count)
