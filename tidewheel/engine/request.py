"""What is asked of the engine and what it answers: sampling parameters, requests, and outputs."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidewheel.engine.errors import InvalidRequestError, quoted

if TYPE_CHECKING:
    from tidewheel.engine.constraints.constraint import TokenConstraints

MAX_LOGPROBS = 20  # likely tokens that a request may ask for at each place


# What beam search, which follows the model's own likeliest tokens, has no place for; nor has it for constraints.
_NEUTRAL_TO_BEAMS: Mapping[str, object] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "stop": (),
}


class FinishReason(str, enum.Enum):
    """Why a sequence ended, in OpenAI's words where it has one."""

    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context is full
    ABORT = "abort"  # the client went away, or the server stopped
    ERROR = "error"  # this request failed; the message is in the output
    INVALID = "invalid"  # it turned out that the request asks for what cannot be; the message is in the output


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a sequence stops. Names and ranges are OpenAI's and vLLM's.

    `max_tokens` None is as many as the context has room for; 0 only computes the prompt. `seed` None draws one for the
    request. `logprobs` k reports the sampled token's log-probability and those of the k most likely tokens, and
    `prompt_logprobs` k the same for the tokens of the prompt; None reports nothing. `shown_special_tokens` have text
    although special tokens are skipped. With a `beam_width` nothing is sampled: the `n` best of that many beams are
    found, by log-probabilities of logits divided by `temperature` (by 1 if it is 0).
    Raises InvalidRequestError naming the field that is out of range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: frozenset[int] = frozenset()
    spaces_between_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0

    @property
    def num_sequences(self) -> int:
        """How many sequences compute the choices."""
        return self.n if self.beam_width is None else self.beam_width

    def __post_init__(self) -> None:
        def require(ok: bool, param: str, rule: str) -> None:
            if not ok:
                raise InvalidRequestError(f"{param} must be {rule}, got {quoted(getattr(self, param))}", param)

        require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "at least 0")
        require(0.0 <= self.temperature <= 100.0, "temperature", "between 0 and 100")
        require(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        require(-1 <= self.top_k < 2**31, "top_k", "between 1 and 2147483647, or 0 or -1 for no limit")
        require(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        # Logits are divided by it, and stay finite.
        require(0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "between 0.01 and 100")
        require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                rule = f"logit_bias must be between -100 and 100, got {bias} for token {token}"
                raise InvalidRequestError(rule, "logit_bias")
        require(self.min_tokens >= 0, "min_tokens", "at least 0")
        require(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        require(all(self.stop), "stop", "strings that are not empty")
        require(self.n >= 1, "n", "at least 1")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            require(count is None or 0 <= count <= MAX_LOGPROBS, name, f"between 0 and {MAX_LOGPROBS}")
        require(-20.0 <= self.length_penalty <= 20.0, "length_penalty", "between -20 and 20")
        if self.beam_width is None:
            require(self.length_penalty == 1.0, "length_penalty", "left out without beam search")
            return
        require(self.n <= self.beam_width, "beam_width", f"at least n, which is {self.n}")
        for name, neutral in _NEUTRAL_TO_BEAMS.items():
            require(getattr(self, name) == neutral, name, "left out with beam search")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. Lower `priority` values run first; equal ones in order of arrival.

    Raises InvalidRequestError for constraints with beam search.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None  # requests with different salts never share cached prefixes
    constraints: TokenConstraints | None = None

    def __post_init__(self) -> None:
        if self.constraints is not None and self.sampling.beam_width is not None:
            raise InvalidRequestError("constraints must be left out with beam search", "constraints")


class SequenceTimes(NamedTuple):
    """When a sequence was queued, first scheduled, and gave its first token, by `time.perf_counter`."""

    queued: float
    scheduled: float
    first_token: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token's log-probability, and the most likely tokens' at that place, as `(token id, logprob)`."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of N tokens of a prompt in a row, and of the K most likely ones at their places.

    `ranks` count from 1: how likely the token was among all. The first token of a prompt has none.
    """

    logprobs: NDArray[np.float32]  # [N]
    ranks: NDArray[np.int32]  # [N]
    top_ids: NDArray[np.int32]  # [N, K]
    top_logprobs: NDArray[np.float32]  # [N, K]

    @classmethod
    def join(cls, parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
        """The log-probabilities of consecutive parts of a prompt, at least one."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


class RequestOutput(msgspec.Struct, frozen=True, gc=False):  # made for every token: much cheaper than a dataclass
    """What one step added to one of a request's `n` choices. The last one of a choice has a `finish_reason`.

    `text` is what these tokens added once it is certain: incomplete UTF-8 and possible stop strings are held back.
    `token_ids` are all tokens sampled so far that were not reported before, also when `text` is empty.
    `stop_reason` is the stop string or stop token id that ended the choice, None for end of sequence.
    `prompt_logprobs` are in the first output of the first choice, of all tokens of the prompt but the first.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
