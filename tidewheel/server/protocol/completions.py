"""`/v1/completions`: the request, the whole answer and a chunk of a streamed one (they have one shape)."""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from tidewheel.server.errors import bad_request
from tidewheel.server.protocol.decode import Unsupported, unsupported
from tidewheel.server.protocol.sampling import EndpointSampling, GenerationBody, TopLogprobs
from tidewheel.server.protocol.usage import Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(GenerationBody, kw_only=True):
    """A body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    add_special_tokens: bool | None = None
    prompt_embeds: Unsupported = None

    def check_supported(self) -> None:
        GenerationBody.check_supported(self)
        if self.echo:
            raise unsupported("echo", " unless it is false")
        if self.suffix:
            raise unsupported("suffix")
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise unsupported("best_of", " unless it equals n")

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one, all as text or all as token ids. Raises ApiError (400) for a mixture or none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise bad_request("prompt is empty", "prompt")
        kind = type(self.prompt[0])
        for i, item in enumerate(self.prompt):
            if type(item) is not kind:
                raise bad_request(f"prompt mixes text and token ids: prompt[{i}] differs from prompt[0]", "prompt")
        if kind is int:
            return [cast(list[int], self.prompt)]
        return cast("list[str] | list[list[int]]", self.prompt)

    def endpoint_sampling(self) -> EndpointSampling:
        """This endpoint's own spelling of the sampling parameters."""
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if self.max_tokens is None and self.min_tokens is not None:
            max_tokens = max(max_tokens, self.min_tokens)
        return EndpointSampling(max_tokens, self.logprobs, {})


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities as parallel lists, one entry a token; `text_offset` counts characters of the choice."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct):
    """One continuation of one prompt, or a piece of it; `index` counts over prompts, then over `n`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Completion(msgspec.Struct, kw_only=True):
    """An answer, or a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
