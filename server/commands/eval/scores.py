"""From distributions to figures. All sums are float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tidewheel.engine.errors import ModelError

F64 = NDArray[np.float64]
_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far the model's distributions are from the reference's: KL(reference || model) in nats, over positions.

    `same_top` is the share of positions where both find the same token most likely.
    """

    mean_kl: float
    p99_kl: float
    max_kl: float
    same_top: float
    reference_perplexity: float


@dataclass(frozen=True, slots=True)
class Scores:
    """What was found for each scored token: `nll` is its negative log-likelihood in nats, `[N] float64`.

    With a reference there are `reference_nll`, `kl [N] float64` and `same_top [N] bool` too.
    """

    nll: F64
    reference_nll: F64 | None = None
    kl: F64 | None = None
    same_top: NDArray[np.bool_] | None = None

    @property
    def perplexity(self) -> float:
        """`exp(mean(nll))`. Raises ModelError if it is not finite."""
        return _perplexity(self.nll)

    @property
    def divergence(self) -> Divergence | None:
        """From the reference; None without one."""
        if self.kl is None:
            return None
        assert self.reference_nll is not None
        assert self.same_top is not None
        return Divergence(
            mean_kl=float(self.kl.mean()),
            p99_kl=float(np.quantile(self.kl, 0.99)),
            max_kl=float(self.kl.max()),
            same_top=float(self.same_top.mean()),
            reference_perplexity=_perplexity(self.reference_nll),
        )

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Those of all parts, in order."""
        return cls(
            nll=np.concatenate([part.nll for part in parts]),
            reference_nll=_joined([part.reference_nll for part in parts]),
            kl=_joined([part.kl for part in parts]),
            same_top=_joined([part.same_top for part in parts]),
        )


def score(
    tokens: NDArray[np.int32], logits: NDArray[np.float32], reference: NDArray[np.float32] | None = None
) -> Scores:
    """Scores of `tokens [R]`, which came where the model gave `logits [R, vocab]`, and the reference `reference`.

    Log-probabilities will do as well.
    Raises ModelError where a probability is 0 that must not be.
    """
    nll = np.empty(len(tokens))
    if reference is None:
        for row, token in enumerate(tokens):
            nll[row] = -_normalized(logits[row])[token]
        return Scores(_finite(nll))
    reference_nll, kl, same_top = np.empty(len(tokens)), np.empty(len(tokens)), np.empty(len(tokens), np.bool_)
    for row, token in enumerate(tokens):
        ours, theirs = _normalized(logits[row]), _normalized(reference[row])
        nll[row], reference_nll[row] = -ours[token], -theirs[token]
        kl[row] = _kl(theirs, ours)
        same_top[row] = ours.argmax() == theirs.argmax()
    return Scores(_finite(nll), _finite(reference_nll), _finite(kl), same_top)


def _normalized(row: NDArray[np.float32]) -> F64:
    """The log-softmax of a row in float64."""
    exact = row.astype(np.float64)
    exact -= exact.max()
    return exact - math.log(np.exp(exact).sum())


def _kl(p: F64, q: F64) -> float:
    """`sum(exp(p) * (p - q))`, where tokens that p gives no probability count nothing."""
    possible = p > -np.inf
    if not possible.all():
        p, q = p[possible], q[possible]
    # Rounding alone can make it negative, for distributions that are all but equal.
    return max(float((np.exp(p) * (p - q)).sum()), 0.0)


def _perplexity(nll: F64) -> float:
    mean = float(nll.mean())
    try:
        return math.exp(mean)
    except OverflowError:
        raise ModelError(
            f"the mean negative log-likelihood of a token is {mean:.0f}, so the perplexity is not a finite number: "
            "check the weights, and the options that they were loaded with"
        ) from None


def _finite(values: F64) -> F64:
    if not np.isfinite(values).all():
        raise ModelError(
            "a token of the text, or one that the reference allows, has probability 0: check that the tokenizer and "
            "the reference belong to this model"
        )
    return values


def _joined(parts: Sequence[NDArray[_T] | None]) -> NDArray[_T] | None:
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if present else None
