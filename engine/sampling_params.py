"""SamplingParams: how tokens are chosen and when a sequence stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import InvalidRequestError, quoted

# Parameters that beam search refuses, because it follows the model's own most likely tokens.
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


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a sequence stops. Names and ranges are OpenAI's and vLLM's.

    `max_tokens` None means as many as the context has room for; 0 only computes the prompt. `seed` None draws a seed
    for the request. `logprobs` k reports the log-probabilities of the sampled token and of the k most likely tokens.
    `prompt_logprobs` k does the same for the prompt's tokens. None reports nothing. `shown_special_tokens` appear in
    the text even if special tokens are skipped. With a `beam_width` nothing is sampled: the answer is the `n` best of
    that many beams, by log-probabilities of logits divided by `temperature` (by 1 if it is 0).
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
            require(count is None or count >= 0, name, "at least 0")
        require(-20.0 <= self.length_penalty <= 20.0, "length_penalty", "between -20 and 20")
        if self.beam_width is None:
            require(self.length_penalty == 1.0, "length_penalty", "left out without beam search")
            return
        require(self.n <= self.beam_width, "beam_width", f"at least n, which is {self.n}")
        for name, neutral in _NEUTRAL_TO_BEAMS.items():
            require(getattr(self, name) == neutral, name, "left out with beam search")
