"""llama.cpp's `/infill` and `/completion`: the requests and the answer."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from .decode import Body, Ignored, Unsupported, documented, is_given

MAX_SNIPPETS = 256


class InfillExtra(msgspec.Struct):
    """A piece of another file."""

    text: str
    filename: str = "tmp"


class _LlamaCppBody(Body, kw_only=True):
    generates: ClassVar[bool] = True

    model: str | None = None
    n_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stream: bool | None = None

    cache_prompt: Ignored = msgspec.field(default_factory=msgspec.Raw)
    id_slot: Ignored = msgspec.field(default_factory=msgspec.Raw)
    n_indent: Ignored = msgspec.field(default_factory=msgspec.Raw)
    response_fields: Ignored = msgspec.field(default_factory=msgspec.Raw)
    samplers: Ignored = msgspec.field(default_factory=msgspec.Raw)
    t_max_predict_ms: Ignored = msgspec.field(default_factory=msgspec.Raw)
    t_max_prompt_ms: Ignored = msgspec.field(default_factory=msgspec.Raw)

    def without_effect(self) -> dict[str, str]:
        reasons = {
            "cache_prompt": "--enable-prefix-caching controls whether prompts are cached",
            "id_slot": "there are no slots: all requests share the cache",
            "n_indent": "an answer ends at a stop string, or with n_predict",
            "response_fields": "an answer has all of its fields",
            "samplers": "the samplers have one order",
            "t_max_predict_ms": "--request-timeout is for all requests",
            "t_max_prompt_ms": "--request-timeout is for all requests",
        }
        return {name: reason for name, reason in reasons.items() if is_given(getattr(self, name))}


class InfillRequest(_LlamaCppBody, kw_only=True):
    """Text with a hole. `prompt` is how its filling begins, `input_extra` what the model is shown of other files.

    `n_predict` below 0 is as many tokens as fit.
    """

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[InfillExtra], documented(maxItems=MAX_SNIPPETS)] | None = None
    prompt: str | None = None


class LlamaCppCompletionRequest(_LlamaCppBody, kw_only=True):
    """Text that goes on, as text or token ids. `n_predict` below 0 is as many tokens as fit."""

    prompt: str | list[int]
    ignore_eos: bool | None = None
    json_schema: dict[str, Any] | None = None

    grammar: Unsupported = None
    n_probs: Unsupported = None


class InfillTimings(msgspec.Struct):
    """Tokens, and milliseconds, of the prompt and of the answer."""

    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class InfillAnswer(msgspec.Struct, kw_only=True):
    """What the model has written, or a piece of it; the last piece says why it ended."""

    content: str
    stop: bool
    index: int = 0
    model: str | msgspec.UnsetType = msgspec.UNSET
    tokens_predicted: int | msgspec.UnsetType = msgspec.UNSET
    tokens_evaluated: int | msgspec.UnsetType = msgspec.UNSET
    tokens_cached: int | msgspec.UnsetType = msgspec.UNSET
    truncated: bool | msgspec.UnsetType = msgspec.UNSET
    stop_type: Literal["eos", "limit", "word"] | msgspec.UnsetType = msgspec.UNSET
    stopping_word: str | msgspec.UnsetType = msgspec.UNSET
    timings: InfillTimings | msgspec.UnsetType = msgspec.UNSET
