"""The parameters that completions and chat completions share, and their translation for the engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Struct

from tidewheel.engine.errors import InvalidRequestError, quoted
from tidewheel.engine.sampling_params import SamplingParams

from ..errors import bad_request
from .decode import Body, Ignored, Unsupported, documented, is_given, unsupported
from .structured import ResponseFormat, StructuredOutputsField

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096  # characters; as much of an answer may be held back

MAX_BIASES = 2**18  # as many as there are tokens in any vocabulary

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,100}")
_TOKEN_ID = re.compile(r"[0-9]{1,10}")

Count: TypeAlias = Annotated[int, documented(minimum=0)]
Fraction: TypeAlias = Annotated[float, documented(minimum=0, maximum=1)]
Penalty: TypeAlias = Annotated[float, documented(minimum=-2, maximum=2)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Body, kw_only=True):
    """A body that asks for tokens. Every field may be null, which is as good as absent."""

    generates: ClassVar[bool] = True

    model: str | None = None
    max_tokens: Annotated[int, documented(minimum=1)] | None = None
    temperature: Annotated[float, documented(minimum=0, maximum=100)] | None = None
    top_p: Annotated[float, documented(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, documented(minimum=-1, maximum=2**31 - 1)] | None = None
    min_p: Fraction | None = None
    n: Annotated[int, documented(minimum=1, maximum=128)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    prompt_logprobs: Count | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    repetition_penalty: Annotated[float, documented(minimum=0.01, maximum=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None  # by token id
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None

    # One of these at most; `structured_output` makes the engine's of them.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None

    # Accepted because no answer depends on them.
    user: str | None = None
    metadata: Ignored = msgspec.field(default_factory=msgspec.Raw)
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    session_id: str | None = None
    store: bool | None = None
    cache_prompt: bool | None = None  # llama.cpp's
    keep_alive: Ignored = msgspec.field(default_factory=msgspec.Raw)  # Ollama's

    early_stopping: Unsupported = None
    ec_transfer_params: Unsupported = None
    kv_transfer_params: Unsupported = None
    logits_processors: Unsupported = None
    logprob_token_ids: Unsupported = None
    repetition_detection: Unsupported = None
    return_mm_kwargs: Unsupported = None
    return_token_offsets: Unsupported = None
    routed_experts_prompt_start: Unsupported = None
    stream_interval: Unsupported = None
    vllm_xargs: Unsupported = None
    watermarking: Unsupported = None

    @property
    def num_choices(self) -> int:
        """How many choices a prompt has in the answer."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    def check_supported(self) -> None:
        """Raises ApiError (400) for a value that this server has no way to honour."""
        if self.stream and self.stream_options is not None and self.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", " unless it is false")
        if self.prompt_logprobs is not None and self.stream:
            raise unsupported("prompt_logprobs", " in a stream: leave out stream")
        if self.use_beam_search and self.stream:
            raise unsupported("use_beam_search", " in a stream, because the best beams are known only at the end")
        if self.best_of is not None and self.best_of < self.num_choices:
            raise bad_request(f"best_of must be at least n, which is {self.num_choices}", "best_of")
        if self.request_id is not None and not _REQUEST_ID.fullmatch(self.request_id):
            raise bad_request("request_id must be 1 to 100 visible ASCII characters", "request_id")

    def without_effect(self) -> dict[str, str]:
        idle: dict[str, str] = {}
        if self.guided_decoding_backend not in (None, "auto", "guidance"):
            idle["guided_decoding_backend"] = "llguidance compiles every structured output"
        if self.store:
            idle["store"] = "only /v1/responses stores answers"
        if is_given(self.metadata):
            idle["metadata"] = "only /v1/responses returns it"
        if self.user is not None:
            idle["user"] = "no answer depends on it"
        if self.service_tier not in (None, "auto", "default"):
            idle["service_tier"] = "there is one tier; priority puts requests before others"
        if self.cache_prompt is not None:
            idle["cache_prompt"] = "--enable-prefix-caching controls whether prompts are cached"
        if is_given(self.keep_alive):
            idle["keep_alive"] = "the model stays loaded"
        if self.stream_options is not None and not self.stream:
            idle["stream_options"] = "the answer is not streamed"
        return idle


class EndpointSampling(Struct, frozen=True):
    """Where an endpoint's spelling of the sampling parameters differs: its own `max_tokens` and `logprobs` rules.

    `names` maps SamplingParams' field names to the endpoint's, for error messages. `n` None is the body's. With
    `prompt_only`, no token need be generated.
    """

    max_tokens: int | None
    logprobs: int | None
    names: Mapping[str, str]
    n: int | None = None
    prompt_logprobs: int | None = None
    prompt_only: bool = False


def sampling_params(
    body: GenerationBody, endpoint: EndpointSampling, defaults: Mapping[str, float | int]
) -> SamplingParams:
    """The engine's sampling parameters for a body; `defaults` are the model's own (generation_config.json).

    Their `max_tokens` bounds the body's. Raises InvalidRequestError naming the body's field.
    """

    def number(field: str, fallback: float) -> float:
        value = getattr(body, field)
        return float(defaults.get(field, fallback) if value is None else value)

    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > MAX_STOP_STRINGS:
        raise bad_request(f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(stop)}", "stop")
    if any(len(one) > MAX_STOP_LENGTH for one in stop):
        raise bad_request(f"a stop string must have at most {MAX_STOP_LENGTH} characters", "stop")
    n = body.num_choices if endpoint.n is None else endpoint.n
    names = endpoint.names
    limit = defaults.get("max_tokens")
    max_tokens = endpoint.max_tokens
    if limit is not None:
        max_tokens = int(limit) if max_tokens is None else min(max_tokens, int(limit))
        if (body.min_tokens or 0) > limit:
            raise bad_request(
                f"min_tokens must be at most {limit}, the longest answer of this server (max_new_tokens of its "
                f"generation config), got {body.min_tokens}",
                "min_tokens",
            )
    if body.use_beam_search:
        # What a model's own defaults say of sampling does not concern a search.
        defaults, n = {}, body.num_choices
        names = {**names, "beam_width": "n" if body.best_of is None else "best_of"}
    try:
        if endpoint.max_tokens is not None and endpoint.max_tokens < 1 and not endpoint.prompt_only:
            raise InvalidRequestError(f"max_tokens must be at least 1, got {endpoint.max_tokens}", "max_tokens")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=number("temperature", 1.0),
            top_p=number("top_p", 1.0),
            top_k=body.top_k if body.top_k is not None else int(defaults.get("top_k", 0)),
            min_p=number("min_p", 0.0),
            seed=body.seed,
            repetition_penalty=number("repetition_penalty", 1.0),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=_logit_bias(body.logit_bias or {}),
            min_tokens=body.min_tokens or 0,
            stop=tuple(stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
            n=n,
            logprobs=endpoint.logprobs,
            prompt_logprobs=endpoint.prompt_logprobs,
            beam_width=(body.best_of or n) if body.use_beam_search else None,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        )
    except InvalidRequestError as error:
        name = names.get(error.param or "")
        if name is None:
            raise
        raise InvalidRequestError(str(error).replace(str(error.param), name, 1), name) from None


def _logit_bias(by_text: Mapping[str, float]) -> dict[int, float]:
    if len(by_text) > MAX_BIASES:
        raise bad_request(f"logit_bias must have at most {MAX_BIASES} entries, got {len(by_text)}", "logit_bias")
    for text in by_text:
        if not _TOKEN_ID.fullmatch(text):
            raise bad_request(f"logit_bias: {quoted(text)} is not a token id", "logit_bias")
    return {int(text): bias for text, bias in by_text.items()}
