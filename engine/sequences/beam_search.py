"""BeamSearch: which continuations of a prompt are followed, and which of all are the best in the end.

Each step extends every beam by its likeliest tokens and follows the `width` likeliest results; those that end with a
stop token are set aside. The best are those with the highest score: the sum of their tokens' log-probabilities,
divided by their length (prompt included, stop token not) to the power of the length penalty, as in vLLM. The search
is over when max_tokens are reached, or when no beam can become better than the best that have ended.

All beams advance in the same steps. The search knows them by their rank; who computes them is not its business.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..outputs import FinishReason, TokenLogprob
from ..sampling_params import SamplingParams


class Hypothesis(Struct, frozen=True):
    """A continuation that has ended. `logprobs` are None unless they are wanted."""

    score: float
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason
    stop_reason: int | None  # the stop token that ended it, None for end of sequence


class Growth(NamedTuple):
    """A beam of the next step: its last token, and the rank of the beam before that token."""

    parent: int
    token: int


class _Node(Struct, frozen=True):
    """A beam as its last token and the beam before it; None is the prompt."""

    parent: _Node | None
    token: int
    total: float  # log-probability of all tokens
    logprob: TokenLogprob | None


class BeamSearch:
    """One request's search. Its beams are ranked, the likeliest first; at the start there is one, the prompt.

    A device is asked for the `num_candidates` likeliest tokens after each beam.
    """

    def __init__(self, sampling: SamplingParams, eos_ids: frozenset[int], vocab_size: int) -> None:
        """`sampling` has a `beam_width` of at most `vocab_size`."""
        assert sampling.beam_width is not None
        self.width = sampling.beam_width
        self._num_wanted = sampling.n
        self._length_penalty = sampling.length_penalty
        self._min_tokens = sampling.min_tokens
        self._num_logprobs = sampling.logprobs
        self._eos_ids = frozenset() if sampling.ignore_eos else eos_ids
        self._stop_ids = np.array(sorted(self._eos_ids | set(sampling.stop_token_ids)), dtype=np.int32)
        # Twice as many as are followed, and enough even if all stop tokens are among them.
        enough = self.width + max(self.width, len(self._stop_ids))
        self.num_candidates = min(max(enough, sampling.logprobs or 0), vocab_size)

    def start(self, prompt_len: int, longest: int) -> None:
        """Begin, or begin again, from a prompt of `prompt_len` tokens, to generate at most `longest`."""
        self._prompt_len, self._longest = prompt_len, longest
        self._beams: list[_Node | None] = [None]
        self._num_tokens = 0
        self._ended: list[Hypothesis] = []

    @property
    def results(self) -> list[Hypothesis]:
        """The best that have ended, the very best first."""
        return self._ended

    def advance(self, top_ids: NDArray[np.int32], top_logprobs: NDArray[np.float32]) -> list[Growth]:
        """Take in the likeliest tokens after each beam, both `[beams, num_candidates]`.

        Returns the beams of the next step, at most `width`; none if the search is over.
        """
        before = np.array([beam.total if beam else 0.0 for beam in self._beams])
        totals = before[:, None] + top_logprobs.astype(np.float64)
        stops = np.isin(top_ids, self._stop_ids)
        if self._num_tokens >= self._min_tokens:
            for beam, rank in np.argwhere(stops).tolist():
                node = self._node(beam, rank, top_ids, top_logprobs, totals)
                stop_reason = None if node.token in self._eos_ids else node.token
                self._end(node, self._num_tokens, FinishReason.STOP, stop_reason)
        self._num_tokens += 1
        best = _largest(totals.ravel(), np.flatnonzero(~stops), self.width)
        parents, ranks = np.divmod(best, top_ids.shape[1])
        beams = [
            self._node(beam, rank, top_ids, top_logprobs, totals)
            for beam, rank in zip(parents.tolist(), ranks.tolist(), strict=True)
        ]
        if self._num_tokens == self._longest:
            for node in beams:
                self._end(node, self._num_tokens, FinishReason.LENGTH, None)
            return []
        if not beams or self._is_decided(beams[0].total):
            return []
        self._beams = list(beams)
        return [Growth(parent, node.token) for parent, node in zip(parents.tolist(), beams, strict=True)]

    def _node(
        self,
        beam: int,
        rank: int,
        top_ids: NDArray[np.int32],
        top_logprobs: NDArray[np.float32],
        totals: NDArray[np.float64],
    ) -> _Node:
        logprob, count = None, self._num_logprobs
        if count is not None:
            top = tuple(zip(top_ids[beam, :count].tolist(), top_logprobs[beam, :count].tolist(), strict=True))
            logprob = TokenLogprob(float(top_logprobs[beam, rank]), top)
        return _Node(self._beams[beam], int(top_ids[beam, rank]), float(totals[beam, rank]), logprob)

    def _end(self, node: _Node, num_tokens: int, reason: FinishReason, stop_reason: int | None) -> None:
        """Set a beam aside, if it is among the best. `num_tokens` are those that count as its length."""
        score = self._score(node.total, num_tokens)
        if len(self._ended) == self._num_wanted and score <= self._ended[-1].score:
            return
        nodes = [node]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        nodes.reverse()
        logprobs = [node.logprob for node in nodes if node.logprob is not None]
        wanted = None if self._num_logprobs is None else logprobs
        ended = Hypothesis(score, [node.token for node in nodes], wanted, reason, stop_reason)
        # The last one comes last among equals.
        self._ended = sorted([*self._ended, ended], key=attrgetter("score"), reverse=True)[: self._num_wanted]

    def _score(self, total: float, num_tokens: int) -> float:
        return float(total / (self._prompt_len + num_tokens) ** self._length_penalty)

    def _is_decided(self, best_total: float) -> bool:
        """Whether no beam can get better than what has ended: tokens only ever take from a total."""
        if len(self._ended) < self._num_wanted:
            return False
        attainable = max(self._score(best_total, self._num_tokens), self._score(best_total, self._longest))
        return self._ended[-1].score >= attainable


def _largest(values: NDArray[np.float64], among: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    """The indices of the `count` largest values, largest first, ties to the lower index."""
    if len(among) > count:
        bound = np.partition(values[among], len(among) - count)[len(among) - count]
        among = among[values[among] >= bound]
    return among[np.argsort(-values[among], kind="stable")[:count]]
