"""`/v1/completions`: the request, the whole answer and a chunk of a streamed one (they have one shape)."""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from ..errors import bad_request
from .decode import Unsupported, unsupported
from .logprobs import PromptLogprobsList
from .sampling import Count, EndpointSampling, GenerationBody
from .usage import Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(GenerationBody, kw_only=True):
    """A body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: Count | None = None
    echo: bool | None = None
    suffix: str | None = None

    add_special_tokens: bool | None = None
    prompt_embeds: Unsupported = None

    def check_supported(self) -> None:
        GenerationBody.check_supported(self)
        if self.suffix and self.echo:
            raise bad_request("echo and suffix exclude each other: the prompt is not before the answer", "echo")
        if self.suffix and self.truncate_prompt_tokens is not None:
            raise bad_request("truncate_prompt_tokens and suffix exclude each other", "truncate_prompt_tokens")
        if self.stream and self.best_of is not None and self.best_of > self.num_choices:
            raise unsupported("best_of", " above n in a stream, because the best are known only at the end")

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
        scored = [k for k in (self.prompt_logprobs, self.logprobs if self.echo else None) if k is not None]
        num_sampled = None if self.use_beam_search else self.best_of
        chosen = num_sampled is not None and num_sampled > self.num_choices
        return EndpointSampling(
            max_tokens,
            0 if chosen and self.logprobs is None else self.logprobs,
            {} if num_sampled is None else {"n": "best_of"},
            n=num_sampled,
            prompt_logprobs=max(scored, default=None),
            prompt_only=bool(self.echo or self.prompt_logprobs is not None),
        )


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities as parallel lists, one entry a token; `text_offset` counts characters of the choice.

    The first token of an echoed prompt has none.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    """One continuation of one prompt, or a piece of it; `index` counts over prompts, then over `n`.

    The first piece has the prompt's token ids, if they are asked for.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobsList | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """An answer, or a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
