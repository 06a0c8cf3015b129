"""Token log-probabilities in the two shapes that OpenAI's endpoints have."""

from __future__ import annotations

from collections.abc import Sequence

from tidewheel.engine.request import RequestOutput, TokenLogprob
from tidewheel.engine.text import Tokenizer
from tidewheel.server.protocol.chat import ChatLogprobs, TokenLogprobEntry, TopLogprob
from tidewheel.server.protocol.completions import CompletionLogprobs

_FLOOR = -9999.0  # JSON has no -inf


class LogprobsFormatter:
    """Writes log-probabilities of one model's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, output: RequestOutput) -> ChatLogprobs | None:
        """The chat shape; None where none were asked for."""
        if output.logprobs is None:
            return None
        entries = []
        for token_id, logprob in zip(output.token_ids, output.logprobs, strict=True):
            text = self._text(token_id)
            top = [TopLogprob(t, _finite(value), list(t.encode())) for t, value in self._top(logprob)]
            entries.append(TokenLogprobEntry(text, _finite(logprob.logprob), list(text.encode()), top))
        return ChatLogprobs(entries)

    def completion(self, outputs: Sequence[RequestOutput], first_offset: int) -> CompletionLogprobs | None:
        """The legacy shape, of consecutive outputs of one choice; `first_offset` is the first token's `text_offset`."""
        if outputs[0].logprobs is None:
            return None
        shape = CompletionLogprobs([], [], [], [])
        offset = first_offset
        for output in outputs:
            for token_id, logprob in zip(output.token_ids, output.logprobs or (), strict=True):
                text = self._text(token_id)
                shape.tokens.append(text)
                shape.text_offset.append(offset)
                shape.token_logprobs.append(_finite(logprob.logprob))
                # The sampled token is always among them, as OpenAI has it.
                shape.top_logprobs.append(
                    {text: _finite(logprob.logprob), **{t: _finite(value) for t, value in self._top(logprob)}}
                )
                offset += len(text)
        return shape

    def _top(self, logprob: TokenLogprob) -> list[tuple[str, float]]:
        return [(self._text(token_id), value) for token_id, value in logprob.top]

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def _finite(value: float) -> float:
    return max(float(value), _FLOOR)
