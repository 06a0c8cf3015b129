"""How to continue a prompt, in vLLM's names. The server's own code checks the values and translates them."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgspec

from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.sampling_params import SamplingParams as EngineSampling
from tidewheel.server.protocol.sampling import EndpointSampling, GenerationBody, sampling_params

from .errors import engine_errors
from .vllm_calls import check_fields

_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_NO_OTHERS = "an answer has text, token ids and log-probabilities alone"
_NOT_SERVED = {
    "extra_args": "there are no plugins that would read them",
    "flat_logprobs": "read logprobs, a list of dicts",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "logprob_token_ids": "logprobs=-1 gives those of all tokens",
    "prompt_logprob_start": "prompt_logprobs are those of the whole prompt",
    "prompt_logprob_token_ids": "prompt_logprobs=-1 gives those of all tokens",
    "repetition_detection": "use repetition_penalty or frequency_penalty",
    "routed_experts_prompt_start": _NO_OTHERS,
    "thinking_token_budget": "max_tokens is the limit of reasoning and answer together",
    "trace_decode_token_ids": _NO_OTHERS,
    "use_beam_search": "LLM.beam_search() searches, with BeamSearchParams",
    "watermarking": _NO_OTHERS,
}
_IDLE = {
    "skip_clone": "parameters are never changed",
    "skip_reading_prefix_cache": "cached prefixes change no answer",
    "stream_interval": "an output comes with each token",
}
_NOT_SEARCHED = {
    "structured_outputs": "beams are not constrained; LLM.generate takes SamplingParams(structured_outputs=...)",
    "watermarking": _NO_OTHERS,
}
_ELSEWHERE = {
    "best_of",
    "logprobs",
    "detokenize",
    "output_kind",
    "structured_outputs",
    "guided_decoding",
    "logit_bias",
    *_NOT_SERVED,
    *_IDLE,
}


class RequestOutputKind(enum.Enum):
    """The content of AsyncLLM.generate's outputs: all text so far, only the new text, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """What the answer must match: one of a JSON schema, a regular expression, choices, a grammar (Lark or EBNF), any
    JSON object, or a structural tag as JSON text.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


@dataclass(kw_only=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """StructuredOutputsParams as vLLM named it up to 0.11. llguidance is the only backend, and there is no fallback."""

    backend: str | None = None
    disable_fallback: bool = False


@dataclass(kw_only=True)
class SamplingParams:
    """How to continue a prompt. Names, defaults and meanings are vLLM's.

    `max_tokens` None is as many as the context has room for. `seed` None draws a seed for each request. With `logprobs`
    or `prompt_logprobs` k, a token's log-probability is reported with those of the k likeliest tokens, with -1 those of
    all tokens, up to the LLM's `max_logprobs`. `output_kind` is for AsyncLLM. `guided_decoding` is the old name of
    `structured_outputs`. `best_of`, from older versions of vLLM, is `n`. The fields after it are not served, or have no
    effect, as the log says once. Raises InvalidRequestError, which names the field, for a value that cannot be used.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    guided_decoding: StructuredOutputsParams | None = None
    best_of: int | None = None
    logits_processors: None = None
    extra_args: None = None
    flat_logprobs: None = None
    use_beam_search: bool = False
    logprob_token_ids: None = None
    prompt_logprob_token_ids: None = None
    prompt_logprob_start: None = None
    repetition_detection: None = None
    thinking_token_budget: None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: None = None
    watermarking: None = None
    stream_interval: int | None = None
    skip_clone: bool = False
    skip_reading_prefix_cache: bool | None = None

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Parameters; None counts as left out. Raises as the class does."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with these."""
        return deepcopy(self)

    def __post_init__(self) -> None:
        self.engine_sampling()

    def body(self) -> GenerationBody:
        """The parameters as the server takes them from a request. Raises InvalidRequestError."""
        check_fields(self, _NOT_SERVED, _IDLE)
        if self.best_of not in (None, self.n):
            raise InvalidRequestError(
                f"best_of must be n, which is {self.n}, got {self.best_of!r}: all choices are returned, so give n, and "
                "choose by cumulative_logprob",
                "best_of",
            )
        if not self.detokenize and self.stop:
            raise InvalidRequestError("stop needs detokenize: stop strings are looked for in the text", "stop")
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _ELSEWHERE}
        if self.logit_bias is not None:
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise InvalidRequestError("guided_decoding is structured_outputs: give one of them", "guided_decoding")
        name = "structured_outputs" if self.guided_decoding is None else "guided_decoding"
        wanted = getattr(self, name)
        if wanted is not None:
            if not isinstance(wanted, StructuredOutputsParams):
                raise InvalidRequestError(f"{name} must be StructuredOutputsParams, got {type(wanted).__name__}", name)
            values = {field.name: getattr(wanted, field.name) for field in fields(StructuredOutputsParams)}
            given["structured_outputs"] = {name: value for name, value in values.items() if value is not None}
        return converted(given)

    def engine_sampling(self, vocab_size: int = 0) -> EngineSampling:
        """The parameters as the engine of a model of `vocab_size` tokens takes them. Raises InvalidRequestError."""
        for name, count in (("logprobs", self.logprobs), ("max_tokens", self.max_tokens)):
            if count is not None and type(count) is not int:
                raise InvalidRequestError(f"{name} must be a whole number or None, got {count!r}", name)
        logprobs, scored = (vocab_size if count == -1 else count for count in (self.logprobs, self.prompt_logprobs))
        own = EndpointSampling(self.max_tokens, logprobs, {}, prompt_logprobs=scored, prompt_only=scored is not None)
        with engine_errors():
            return sampling_params(self.body(), own, {})


@dataclass(kw_only=True)
class BeamSearchParams:
    """A search for the likeliest continuations, `beam_width` of them. Names and defaults are vLLM's.

    `structured_outputs` and `watermarking` are not served. Raises InvalidRequestError, which names the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: None = None
    skip_special_tokens: bool = True
    watermarking: None = None

    def __post_init__(self) -> None:
        self.engine_sampling()

    def engine_sampling(self, vocab_size: int = 0) -> EngineSampling:
        """See SamplingParams."""
        check_fields(self, _NOT_SEARCHED, {})
        given = {name: value for name, value in asdict(self).items() if name not in {"beam_width", *_NOT_SEARCHED}}
        body = converted({**given, "n": self.beam_width, "use_beam_search": True})
        with engine_errors():
            return sampling_params(body, EndpointSampling(self.max_tokens, 0, {"n": "beam_width"}), {})


def converted(given: Mapping[str, Any]) -> GenerationBody:
    """Fields of a request's body as that body. Raises InvalidRequestError for one of another type."""
    try:
        return msgspec.convert(given, GenerationBody)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _AT.search(text)
        param = place[1] if place else ""
        reason = text[: place.start()] if place else text
        raise InvalidRequestError(f"{param}: {reason[0].lower()}{reason[1:]}", param) from None
