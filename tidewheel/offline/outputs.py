"""The results, in vLLM's shapes: answers, embeddings, classes and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .lora_request import LoRARequest

T = TypeVar("T")


@dataclass(slots=True)
class Logprob:
    """A token's log-probability. `rank` is 1 for the likeliest, None for a sampled token that is not among those that
    were asked for.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs: TypeAlias = dict[int, Logprob]
"""Log-probabilities of one place, by token id: first the token that stands there, then the likeliest."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers to a prompt.

    `finish_reason` is None while it goes on, else stop, length, abort or error. With error, `error` says what went
    wrong. `stop_reason` is the stop string or stop token id that ended the answer. `cumulative_logprob` is known if
    log-probabilities were asked for. `lora_request` is the adapter that answered.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    error: str | None = None

    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds: `arrival_time` since 1970, the others by `time.perf_counter`."""

    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    num_generation_tokens: int

    @property
    def first_token_latency(self) -> float:
        """Seconds from the request's arrival to its first token."""
        return self.first_token_ts - self.queued_ts


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers. `prompt` is None if the prompt was given as token ids.

    `prompt_logprobs` has an entry for each token of the prompt; the first one is None. `num_cached_tokens` of the
    prompt were found in the prefix cache. Models with an encoder for prompts are not served, so `encoder_prompt` and
    `encoder_prompt_token_ids` are always None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the beams that were found: its tokens, including the prompt's, and its text without the prompt."""

    tokens: list[int]
    text: str
    cum_logprob: float
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of a prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """What was made of an input, float32: `[dimensions]` or `[labels]`; `[tokens, ...]` for a task of tokens."""

    data: NDArray[np.float32]


@dataclass(slots=True)
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probabilities of a text's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """What an encoder made of an input."""

    request_id: str
    outputs: T
    prompt_token_ids: Sequence[int]
    finished: bool = True


EmbeddingRequestOutput: TypeAlias = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput: TypeAlias = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput: TypeAlias = PoolingRequestOutput[ScoringOutput]
