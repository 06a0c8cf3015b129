"""StepBatch and StepOutput: the flat arrays that pass between the engine and a device, once a step.

T tokens of S sequences, ragged; R of the tokens want a next token sampled ("rows").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DeviceError


def _complete() -> None:
    pass


@dataclass(slots=True)
class TokenMasks:
    """Which tokens the rows of a step may sample: bit `t % 32` of word `t // 32` is set if token t is allowed.

    The bits may be written until `wait` returns, while the forward pass runs: a device calls it before it samples.
    `waited_s` is how long that has kept the device.
    """

    bits: NDArray[np.uint32]  # [M, W]; a mask has at least a bit for every token of the vocabulary
    index: NDArray[np.int32]  # [R]; which mask is the row's, -1: every token is allowed
    written: Callable[[], None] = _complete  # returns when they are
    waited_s: float = 0.0

    def wait(self) -> None:
        """Return when the bits are written."""
        started = time.perf_counter()
        self.written()
        self.waited_s += time.perf_counter() - started


@dataclass(slots=True)
class SamplingBatch:
    """How each of the R rows picks its token. The order of operations is that of `sampling.py`.

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
    target: NDArray[np.int32] | None = None  # [R]; a token to report on instead of sampling one, -1: none
    logprob_temperature: NDArray[np.float32] | None = None  # [R]; log-probabilities are of logits divided by it
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

    def copy(self) -> SamplingBatch:
        """The same rows in arrays of their own, which stay as they are when the next batch is built."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        copies: dict[str, Any] = {name: array.copy() for name, array in values.items() if isinstance(array, np.ndarray)}
        return replace(self, **copies)

    def asks_for_more(self) -> NDArray[np.bool_]:
        """Which rows want more than a token drawn from their logits: penalties, biases, masks or log-probabilities."""
        asks = (np.diff(self.history_start) > 0) | (np.diff(self.bias_start) > 0) | (self.num_logprobs >= 0)
        if self.target is not None:
            asks |= self.target >= 0
        if self.masks is not None:
            asks |= self.masks.index >= 0
        return asks

    def with_targets(self, targets: NDArray[np.int32], num_logprobs: NDArray[np.int32]) -> SamplingBatch:
        """These rows, and more that report on `targets` [N], each with `num_logprobs` [N] of the likeliest tokens."""
        scored = SamplingBatch.greedy(np.zeros(len(targets), np.int32))
        scored.num_logprobs = num_logprobs
        for field in fields(self):
            mine, more = getattr(self, field.name), getattr(scored, field.name)
            if more is not None:
                more = more[1:] + mine[-1] if field.name.endswith("_start") else more
                setattr(scored, field.name, np.concatenate([mine, more]))
        scored.target = np.concatenate([np.full(len(self.position), -1, np.int32), targets])
        if self.logprob_temperature is not None:
            scored.logprob_temperature = np.append(self.logprob_temperature, np.ones(len(targets), np.float32))
        if self.masks is not None:
            index = np.append(self.masks.index, np.full(len(targets), -1, np.int32))
            scored.masks = replace(self.masks, index=index)
        return scored


@dataclass(slots=True)
class StepBatch:
    """One forward pass. A sequence's tokens are consecutive and its positions ascend by one.

    After the step, sequence s has `context_len[s]` tokens in the KV cache: its last token's position plus one. The
    token at position p lies in slot `p % block_size` of block `block_tables[s, p // block_size]`. The tables of the
    first cache group are `block_tables`; those of the others, `window_tables`, are of the same shape.

    Devices with recurrent layers need `num_draft_tokens`. The next step of a sequence begins behind the draft tokens
    that were right, and needs the state at that place. K and V of a rejected draft token are written over.

    A step that `is_async` has one token of each sequence: the token that the step before samples in the same row. That
    is not sampled yet, so `token_ids` has no meaning.

    Rows of `media_rows` take the place of embeddings, unscaled: token t has row `media_index[t]`, or none if that is
    -1. A row begins with the embedding; what is added to the token's row after each of `media_layers` follows, one
    hidden size for each. `rope_positions` are the positions on rope's axes if any token's differ from its `positions`.
    In layers that are `two_way`, token t sees the positions below `visible_until[t]`, which is above its own, does not
    descend within a sequence, and is at most the sequence's `context_len`.
    """

    token_ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T]
    query_start: NDArray[np.int32]  # [S + 1]; sequence s owns tokens [query_start[s], query_start[s + 1])
    context_len: NDArray[np.int32]  # [S]
    block_tables: NDArray[np.int32]  # [S, max_blocks]; unused entries are the group's padding_block
    logits_rows: NDArray[np.int32]  # [R]; indices into T, in any order and as often as wanted
    sampling: SamplingBatch
    window_tables: tuple[NDArray[np.int32], ...] = ()
    state_slots: NDArray[np.int32] | None = None  # [S]; where recurrent layers keep what they know of a sequence
    num_draft_tokens: NDArray[np.int32] | None = None  # [S]; at the end of each sequence's tokens; None: there are none
    is_async: bool = False
    adapters: NDArray[np.int32] | None = None  # [S]; numbers of LoRA adapters, -1: none; None: no sequence has one
    media_rows: NDArray[np.float32] | None = None  # [M, (1 + layers) * hidden]
    media_index: NDArray[np.int32] | None = None  # [T], with media_rows
    media_layers: NDArray[np.int32] | None = None  # [layers], numbers of layers; None: none
    rope_positions: NDArray[np.int32] | None = None  # [axes, T]
    visible_until: NDArray[np.int32] | None = None  # [T]; None: all tokens see what is up to themselves

    def refuse_media(self, device: str) -> None:
        """Raises DeviceError, with the device's name, if a token has a row of media, or the places of media."""
        if not (self.media_rows is None and self.rope_positions is None and self.visible_until is None):
            raise DeviceError(f"the {device} device takes no media: take --device cpu")


@dataclass(slots=True)
class StepOutput:
    """What a step produced, row by row. Log-probabilities are of the raw logits, before penalties and temperature.

    `top_ids` and `top_logprobs` have K columns, the largest `num_logprobs` of all rows. A row uses `num_logprobs` of
    them, most likely first, ties to the lower id. Both are None if no row asked, and so is `logprobs`. `ranks` count
    from 1, and are None if no row has a target.
    """

    token_ids: NDArray[np.int32]  # [R]
    logprobs: NDArray[np.float32] | None = None  # [R], of the sampled tokens and the targets
    ranks: NDArray[np.int32] | None = None  # [R], of the targets among the tokens by likelihood
    top_ids: NDArray[np.int32] | None = None  # [R, K]
    top_logprobs: NDArray[np.float32] | None = None  # [R, K]

    def of_rows(self, rows: list[int]) -> StepOutput:
        """The same of these rows alone."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: array[rows] for name, array in arrays.items() if array is not None})

    def copy(self) -> StepOutput:
        """The same in arrays of their own."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: array.copy() for name, array in arrays.items() if array is not None})

    @classmethod
    def empty(cls, sampling: SamplingBatch) -> StepOutput:
        """Room for all that these rows ask for."""
        rows = len(sampling.position)
        output = cls(np.empty(rows, np.int32))
        if rows and (most := int(sampling.num_logprobs.max())) >= 0:
            output.logprobs = np.zeros(rows, np.float32)
            output.top_ids = np.zeros((rows, most), np.int32)
            output.top_logprobs = np.zeros((rows, most), np.float32)
        if sampling.target is not None:
            output.ranks = np.zeros(rows, np.int32)
        return output
