"""StepBatch and StepOutput: the flat arrays that pass between the engine and a device, once a step.

T tokens of S sequences, ragged; R of the tokens want a next token sampled ("rows").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_TOP_LOGPROBS = 20


def _complete() -> None:
    pass


@dataclass(slots=True)
class TokenMasks:
    """Which tokens the rows of a step may sample: bit `t % 32` of word `t // 32` is set if token t is allowed.

    The bits may be written until `wait` returns, while the forward pass runs: a device calls it once before it samples.
    """

    bits: NDArray[np.uint32]  # [M, W]; a mask has at least a bit for every token of the vocabulary
    index: NDArray[np.int32]  # [R]; which mask is the row's, -1: every token is allowed
    wait: Callable[[], None] = _complete


@dataclass(slots=True)
class SamplingBatch:
    """How each of the R rows picks its token. The order of operations is that of `engine/sampling.py`.

    Ragged lists are a start array of R + 1 offsets and flat values: row r owns `[start[r], start[r + 1])`.
    """

    temperature: NDArray[np.float32]  # [R]; 0 is greedy
    top_k: NDArray[np.int32]  # [R]; 0 is off
    top_p: NDArray[np.float32]  # [R]; 1 is off
    min_p: NDArray[np.float32]  # [R]; 0 is off
    seed: NDArray[np.uint64]  # [R]
    position: NDArray[np.int32]  # [R]; of the token being sampled; with seed, the random generator's counter
    repetition_penalty: NDArray[np.float32]  # [R]; 1 is off
    presence_penalty: NDArray[np.float32]  # [R]; 0 is off
    frequency_penalty: NDArray[np.float32]  # [R]; 0 is off
    num_logprobs: NDArray[np.int32]  # [R]; -1 none, k: the sampled token's and the k most likely ones'
    history_start: NDArray[np.int32]  # [R + 1]
    history_ids: NDArray[np.int32]  # prompt then output tokens of the row; empty for a row without penalties
    prompt_len: NDArray[np.int32]  # [R]; how many of the row's history tokens are prompt
    bias_start: NDArray[np.int32]  # [R + 1]
    bias_ids: NDArray[np.int32]  # distinct within a row
    bias_values: NDArray[np.float32]  # added to the logits; -inf forbids a token
    masks: TokenMasks | None = None  # None: no row has one

    @classmethod
    def greedy(cls, positions: ArrayLike) -> SamplingBatch:
        """Rows that take the most likely token and ask for nothing else; their next tokens have these positions [R]."""
        position = np.array(positions, np.int32)
        rows = len(position)
        return cls(
            temperature=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            seed=np.zeros(rows, np.uint64),
            position=position,
            repetition_penalty=np.ones(rows, np.float32),
            presence_penalty=np.zeros(rows, np.float32),
            frequency_penalty=np.zeros(rows, np.float32),
            num_logprobs=np.full(rows, -1, np.int32),
            history_start=np.zeros(rows + 1, np.int32),
            history_ids=np.empty(0, np.int32),
            prompt_len=np.zeros(rows, np.int32),
            bias_start=np.zeros(rows + 1, np.int32),
            bias_ids=np.empty(0, np.int32),
            bias_values=np.empty(0, np.float32),
        )


@dataclass(slots=True)
class StepBatch:
    """One forward pass. A sequence's tokens are consecutive and its positions ascend by one.

    After the step, sequence s has `context_len[s]` tokens in the KV cache: its last token's position plus one. The
    token at position p lies in slot `p % block_size` of block `block_tables[s, p // block_size]`.
    """

    token_ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T]
    query_start: NDArray[np.int32]  # [S + 1]; sequence s owns tokens [query_start[s], query_start[s + 1])
    context_len: NDArray[np.int32]  # [S]
    block_tables: NDArray[np.int32]  # [S, max_blocks]; unused entries are 0
    logits_rows: NDArray[np.int32]  # [R]; ascending indices into T
    sampling: SamplingBatch
    return_logits: bool = False  # for tests and tools: costs R x vocab floats


@dataclass(slots=True)
class StepOutput:
    """What a step produced, row by row. Log-probabilities are of the raw logits, before penalties and temperature.

    `top_ids` and `top_logprobs` have `max(num_logprobs, 0)` columns used in each row, most likely first, ties to the
    lower id; both are None if no row asked, and so is `logprobs`.
    """

    token_ids: NDArray[np.int32]  # [R]
    logprobs: NDArray[np.float32] | None = None  # [R], of the sampled tokens
    top_ids: NDArray[np.int32] | None = None  # [R, MAX_TOP_LOGPROBS]
    top_logprobs: NDArray[np.float32] | None = None  # [R, MAX_TOP_LOGPROBS]
    logits: NDArray[np.float32] | None = None  # [R, vocab]
