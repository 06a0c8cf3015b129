"""The engine's outputs: each choice's tokens and text as they come, and why it ended."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray


class FinishReason(str, enum.Enum):
    """Why a sequence ended, in OpenAI's words where it has one."""

    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context is full
    ABORT = "abort"  # the client went away, or the server stopped
    ERROR = "error"  # this request failed; the message is in the output
    INVALID = "invalid"  # the request turned out to ask for something impossible; the message is in the output


class SequenceTimes(NamedTuple):
    """When a sequence was queued, first scheduled, and gave its first token, by `time.perf_counter`."""

    queued: float
    scheduled: float
    first_token: float


class TokenLogprob(Struct, frozen=True):
    """A sampled token's log-probability, and the most likely tokens' at that place, as `(token id, logprob)`."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of N consecutive tokens of a prompt, and of the K most likely tokens at each place.

    `ranks` say how likely the token was among all tokens, from 1 on. The first token of a prompt has no entry.
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
    """The output of one step for one of a request's `n` choices. A choice's last output has a `finish_reason`.

    `text` is what is certain so far: incomplete UTF-8 and possible stop strings are held back. `token_ids` are all
    sampled tokens that were not reported before, even if `text` is empty.
    `stop_reason` is the stop string or stop token id that ended the choice, None for end of sequence.
    `prompt_logprobs` are in the first output of the first choice. They cover all prompt tokens except the first.
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
