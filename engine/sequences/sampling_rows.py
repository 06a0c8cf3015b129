"""SamplingRow: how a sequence's tokens are sampled, as the numbers that a step's sampling arrays are made of."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..devices.batch import SamplingBatch
from ..sampling_params import SamplingParams
from .beam_search import BeamSearch

Scalar = TypeVar("Scalar", np.int32, np.float32)
_NO_IDS, _NO_VALUES = np.empty(0, np.int32), np.empty(0, np.float32)
Bias = tuple[NDArray[np.int32], NDArray[np.float32]]  # token ids, and what is added to their logits


class SamplingRow:
    """The row of a sequence in a SamplingBatch, without the position of its token and the tokens before it.

    `stop_ids` are forbidden at positions before `min_length`, in tokens, prompt included. `uses_history`: penalties
    need the tokens before. `has_bias`: some tokens have a bias at some position.
    """

    __slots__ = (
        "_bias",
        "_early_bias",
        "_min_length",
        "floats",
        "has_bias",
        "ints",
        "logprob_temperature",
        "num_logprobs",
        "seed",
        "uses_history",
    )

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        seed: int,
        prompt_len: int,
        min_length: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        search: BeamSearch | None = None,
    ) -> None:
        self.seed = seed
        self.num_logprobs = -1 if sampling.logprobs is None else sampling.logprobs
        self.logprob_temperature = 1.0
        if search is not None:
            self.num_logprobs = search.num_candidates
            self.logprob_temperature = sampling.temperature or 1.0
        self.uses_history = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )
        self.floats = (
            sampling.temperature if search is None else 0.0,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self.ints = (max(sampling.top_k, 0), self.num_logprobs, prompt_len if self.uses_history else 0)
        self._min_length = min_length
        self._bias = self._early_bias = _bias(sampling.logit_bias)
        if prompt_len < min_length:
            self._early_bias = _bias({**sampling.logit_bias, **dict.fromkeys(stop_ids, -np.inf)})
        self.has_bias = len(self._early_bias[0]) > 0

    def bias(self, position: int) -> Bias:
        """What is added to the logits of the token at `position`."""
        return self._early_bias if position < self._min_length else self._bias


def sampling_batch(
    rows: Seq[SamplingRow], positions: NDArray[np.int32], counts: Seq[int] | None = None
) -> SamplingBatch:
    """Rows that sample the tokens at `positions` [R], all without history. The array becomes the batch's.

    Each of `rows` is for one token. With `counts`, it is for that many tokens, one after the other.
    """
    count = len(positions)
    # One array a kind of number: its rows are contiguous arrays of one parameter each.
    floats = np.array([row.floats for row in rows], dtype=np.float32).reshape(len(rows), 6).T
    ints = np.array([row.ints for row in rows], dtype=np.int32).reshape(len(rows), 3).T
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    temperatures: NDArray[np.float32] | None = None
    if any(row.logprob_temperature != 1.0 for row in rows):
        temperatures = np.array([row.logprob_temperature for row in rows], dtype=np.float32)
    if counts is None:
        floats, ints = floats.copy(), ints.copy()
    else:
        floats, ints, seeds = floats.repeat(counts, axis=1), ints.repeat(counts, axis=1), seeds.repeat(counts)
        temperatures = None if temperatures is None else temperatures.repeat(counts)
    sampling = SamplingBatch(
        temperature=floats[0],
        top_p=floats[1],
        min_p=floats[2],
        repetition_penalty=floats[3],
        presence_penalty=floats[4],
        frequency_penalty=floats[5],
        top_k=ints[0],
        num_logprobs=ints[1],
        prompt_len=ints[2],
        seed=seeds,
        position=positions,
        history_start=np.zeros(count + 1, dtype=np.int32),
        history_ids=_NO_IDS,
        bias_start=np.zeros(count + 1, dtype=np.int32),
        bias_ids=_NO_IDS,
        bias_values=_NO_VALUES,
        logprob_temperature=temperatures,
    )
    if any(row.has_bias for row in rows):
        of_each = rows if counts is None else [row for row, n in zip(rows, counts, strict=True) for _ in range(n)]
        biases = [row.bias(position) for row, position in zip(of_each, positions.tolist(), strict=True)]
        sampling.bias_start = _starts([len(ids) for ids, _ in biases])
        sampling.bias_ids = _joined([ids for ids, _ in biases], np.int32)
        sampling.bias_values = _joined([values for _, values in biases], np.float32)
    return sampling


def set_history(sampling: SamplingBatch, histories: Seq[NDArray[np.int32]]) -> None:
    """Give each row the tokens before its own; none to rows without penalties."""
    sampling.history_start = _starts([len(history) for history in histories])
    sampling.history_ids = _joined(histories, np.int32)


def _bias(bias: Mapping[int, float]) -> Bias:
    ids = np.fromiter(bias.keys(), dtype=np.int32, count=len(bias))
    return ids, np.fromiter(bias.values(), dtype=np.float32, count=len(bias))


def _starts(lengths: list[int]) -> NDArray[np.int32]:
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _joined(parts: Seq[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
