"""The largest size that an answer may have, estimated from the request before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tidewheel.engine.sampling_params import SamplingParams

from ..errors import ApiError, bad_request

# Bytes of JSON, rounded up from the tokenizers of many languages. An answer that waits for its reader takes about as
# much of the server's memory.
_TOKEN = 16  # a token's text and id
_LIKELY_TOKEN = 96  # an entry of `logprobs`: each token has one for itself, and as many more as the request asks for
_EVENTS = 5  # times that log-probabilities are sent, because the last events of a response repeat them
_SHORTENED = 1024  # tokens; an answer without `max_tokens` is refused rather than made shorter than this


def bounded(
    kind: str,
    lengths: Sequence[int],
    sampling: SamplingParams,
    *,
    shows_prompt: bool,
    max_model_len: int,
    default_max_tokens: int | None,
    max_bytes: int,
) -> SamplingParams:
    """The sampling parameters, changed so that an answer cannot become larger than `max_bytes`.

    `kind` is the beginning of the answer's id, `lengths` are the prompts' lengths in tokens. A request without
    `max_tokens`, or with the server's own `default_max_tokens`, gets as many tokens as fit. Raises ApiError (400) for a
    request that asks for too much.
    """
    copies = sampling.num_sequences if kind == "cmpl" else 1  # completions repeat the prompt's part for each choice
    of_prompt = _token_bytes(sampling.prompt_logprobs) if sampling.prompt_logprobs is not None else 0
    of_prompt += _TOKEN if shows_prompt else 0
    of_token = _token_bytes(sampling.logprobs) * (_EVENTS if kind == "resp" else 1)
    room = max(max_model_len - min(lengths), 0)
    wanted = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    prompts_bytes = sum(lengths) * of_prompt * copies
    step_bytes = len(lengths) * sampling.num_sequences * of_token  # for one more token of every choice
    if prompts_bytes + wanted * step_bytes <= max_bytes:
        return sampling
    fitting = (max_bytes - prompts_bytes) // step_bytes
    if sampling.max_tokens in (None, default_max_tokens) and fitting >= max(_SHORTENED, sampling.min_tokens):
        return replace(sampling, max_tokens=fitting)
    raise _too_large(prompts_bytes, wanted * step_bytes, len(lengths) * sampling.num_sequences, wanted, max_bytes)


def _token_bytes(logprobs: int | None) -> int:
    return _TOKEN + (0 if logprobs is None else (1 + logprobs) * _LIKELY_TOKEN)


def _too_large(prompts_bytes: int, tokens_bytes: int, choices: int, tokens: int, max_bytes: int) -> ApiError:
    return bad_request(
        f"the answer may become {prompts_bytes + tokens_bytes} bytes large, {prompts_bytes} of them for what is asked "
        f"about the prompts and {tokens_bytes} for {choices} choices of up to {tokens} tokens; this server's limit is "
        f"{max_bytes} bytes (--max-answer-size). Ask for fewer logprobs or prompt_logprobs, tokens, choices or prompts",
        code="answer_too_large",
    )
