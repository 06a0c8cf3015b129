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
Bias = tuple[NDArray[np.int32], NDArray[np.float32]]  # token ids, and what is added to their logits


class SamplingRow:
    """The row of a sequence in a SamplingBatch, but for the position of its token and the tokens before it.

    `stop_ids` are forbidden at positions before `min_length`, in tokens, prompt included. `uses_history`: penalties
    want the tokens before.
    """

    __slots__ = (
        "_bias",
        "_early_bias",
        "_min_length",
        "floats",
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

    def bias(self, position: int) -> Bias:
        """What is added to the logits of the token at `position`."""
        return self._early_bias if position < self._min_length else self._bias


def sampling_batch(rows: Seq[SamplingRow], positions: NDArray[np.int32]) -> SamplingBatch:
    """Rows that sample the tokens at `positions` [R], all without history. The array becomes the batch's."""
    count = len(rows)
    # One array a kind of number: its rows are contiguous arrays of one parameter each.
    floats = np.array([row.floats for row in rows], dtype=np.float32).reshape(count, 6).T.copy()
    ints = np.array([row.ints for row in rows], dtype=np.int32).reshape(count, 3).T.copy()
    biases = [row.bias(position) for row, position in zip(rows, positions.tolist(), strict=True)]
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
        seed=np.array([row.seed for row in rows], dtype=np.uint64),
        position=positions,
        history_start=np.zeros(count + 1, dtype=np.int32),
        history_ids=np.empty(0, dtype=np.int32),
        bias_start=_starts([len(ids) for ids, _ in biases]),
        bias_ids=_joined([ids for ids, _ in biases], np.int32),
        bias_values=_joined([values for _, values in biases], np.float32),
    )
    if any(row.logprob_temperature != 1.0 for row in rows):
        sampling.logprob_temperature = np.array([row.logprob_temperature for row in rows], dtype=np.float32)
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
