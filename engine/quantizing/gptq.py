"""Rounding a matrix to small integers: each weight to the nearest, or by GPTQ, so that its outputs change least.

The weight of output n and input k, in group `g = k // group_size`, becomes `scales[n, g] * (codes[n, k] - zeros[n,
g])`. GPTQ (https://arxiv.org/abs/2210.17323) rounds one input after the other, and lets those that follow make up for
the error so far. Scales and zeros are chosen before, so groups stay as they are in whatever order inputs are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tidewheel import _native

from ..weights.dtypes import DType
from .report import relative_error
from .statistics import InputStatistics

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]

DAMP = 0.01  # of the mean of the Hessian's diagonal is added to it
_BLOCK = 64  # inputs that are rounded before BLAS takes their errors to others; native code takes no more at once
_STRIP = 64  # outputs that native code rounds together
_FACTOR_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers that a matrix is rounded to: codes of `bits` bits, with a scale and a zero for each `group_size`
    inputs of an output. The zero of a `symmetric` grid is always the middle, `2 ** (bits - 1)`. `scales` is what scales
    are stored as.
    """

    bits: Literal[4, 8]
    group_size: int
    symmetric: bool
    scales: DType = "float16"

    @property
    def largest(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero of a symmetric grid."""
        return 1 << (self.bits - 1)


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """A matrix `[N, K]` on a grid with G groups: `codes [N, K]`, `scales [N, G]` (each a number of the grid's type of
    scales), `zeros [N, G]`. `error` is that of a TensorReport.
    """

    codes: Codes
    scales: Floats
    zeros: Codes
    error: float


class Hessian:
    """The Hessian of the squared error of a matrix's outputs, factored for GPTQ. `gram [K, K]` is half of it.

    It is damped, and its inputs are in `order`, those with the largest squares first. It is `F D F^T`, with an upper
    triangular F that has ones on its diagonal, and the diagonal matrix D of `weights`. GPTQ's updates, by the Cholesky
    factor of the inverse, come to this: input k is the nearest to `w_k + sum of e_i F_ik over i < k`, with the errors e
    of the inputs before it (https://arxiv.org/abs/2307.13304, theorem 6). F follows from the Cholesky factor of the
    Hessian with its inputs reversed, so no inverse is needed.

    Raises ValueError for a gram matrix that has numbers that are not finite.
    """

    def __init__(self, gram: Floats) -> None:
        diagonal = gram.diagonal().astype(np.float64)
        if not np.isfinite(gram).all():
            raise ValueError("the gram matrix has numbers that are not finite")
        ascending = np.argsort(diagonal, kind="stable")
        self.order = ascending[::-1]
        self.damping = DAMP * float(diagonal.mean()) or 1.0
        while True:
            matrix = gram[np.ix_(ascending, ascending)].astype(np.float64)
            matrix[np.diag_indices(len(gram))] += self.damping
            try:
                _cholesky(matrix)
                break
            except np.linalg.LinAlgError:
                self.damping *= 10
        self._upper = matrix[::-1, ::-1]
        self._roots = self._upper.diagonal()
        self.weights = self._roots**2

    def factor(self, top: int, bottom: int, left: int, right: int) -> Floats:
        """Rows `[top, bottom)` of columns `[left, right)` of F."""
        return (self._upper[top:bottom, left:right] / self._roots[left:right]).astype(np.float32)

    def mean_square(self, rows: Floats) -> float:
        """The mean of the squared outputs, summed over all outputs, of a matrix with inputs in order, `[K, N]`."""
        total = 0.0
        for start in range(0, len(rows), _FACTOR_BLOCK):
            stop = min(start + _FACTOR_BLOCK, len(rows))
            products = self.factor(0, stop, start, stop).T @ rows[:stop]
            total += float(self.weights[start:stop] @ np.square(products).sum(axis=1, dtype=np.float64))
        return self.undamped(total, rows)

    def undamped(self, mean_square: float, rows: Floats) -> float:
        """The same without what the damping adds to it."""
        return max(mean_square - self.damping * float(np.square(rows).sum(dtype=np.float64)), 0.0)


def round_matrix(
    weight: Floats,
    grid: Grid,
    statistics: InputStatistics | None = None,
    hessian: Hessian | None = None,
    threads: int = 1,
) -> RoundedMatrix:
    """Round a finite `weight [N, K]` to the grid, whose group size divides K and is a multiple of 16.

    Scales are those with the least squared error, in which inputs count as the statistics say, and all the same without
    them. Inputs that were always 0 count a little too, because they need not be 0 in another text. With the `hessian`
    of the inputs codes are GPTQ's, else the nearest. The result does not depend on `threads`.
    """
    squares = None if statistics is None else statistics.squares.astype(np.float32)
    importance = np.ones(weight.shape[1], np.float32)
    if squares is not None and squares.any():
        importance = squares + np.float32(DAMP) * squares.mean()
    weight = np.ascontiguousarray(weight)
    codes, scales = (
        np.empty(weight.shape, np.uint8),
        np.empty((len(weight), weight.shape[1] // grid.group_size), np.float32),
    )
    zeros, lost, whole = np.empty(scales.shape, np.uint8), np.empty(len(weight)), np.empty(len(weight))
    _native.search_grid(
        weight, importance, grid.bits, grid.symmetric, grid.scales, scales, zeros, codes, lost, whole, threads
    )
    if hessian is None:
        return RoundedMatrix(codes, scales, zeros, relative_error(lost.sum(), whole.sum()))
    codes, error = _gptq(weight, grid, scales, zeros, hessian, threads)
    return RoundedMatrix(codes, scales, zeros, error)


def _gptq(
    weight: Floats, grid: Grid, scales: Floats, zeros: Codes, hessian: Hessian, threads: int
) -> tuple[Codes, float]:
    """The codes, and the error."""
    originals, (outputs, inputs) = np.ascontiguousarray(weight.T), weight.shape
    rows = originals[hessian.order]  # one of each input: what is to be rounded, and once it is, the error
    codes, residuals = np.empty((inputs, outputs), np.uint8), np.empty(inputs)
    groups = (hessian.order // grid.group_size).astype(np.int32)
    scale_of, zero_of = np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T, np.float32)
    whole = hessian.mean_square(rows)

    def round_rows(start: int, stop: int) -> None:
        """Round inputs that make up already for the errors of all before them."""
        if stop - start > _BLOCK:
            middle = start + (stop - start) // (2 * _BLOCK) * _BLOCK
            middle = middle if middle > start else start + _BLOCK
            round_rows(start, middle)
            rows[middle:stop] += hessian.factor(start, middle, middle, stop).T @ rows[start:middle]
            round_rows(middle, stop)
            return
        block = slice(start, stop)
        squares = np.empty((-(-outputs // _STRIP), stop - start))
        _native.round_inputs(
            rows[block], originals[hessian.order[block]], hessian.factor(start, stop, start, stop), groups[block],
            scale_of, zero_of, grid.bits, codes[block], squares, threads,
        )  # fmt: skip
        residuals[block] = squares.sum(axis=0)

    round_rows(0, inputs)
    error = relative_error(hessian.undamped(float(hessian.weights @ residuals), rows), whole)
    in_order = np.empty_like(codes)
    in_order[hessian.order] = codes
    return np.ascontiguousarray(in_order.T), error


def _cholesky(matrix: NDArray[np.float64]) -> None:
    """The lower Cholesky factor of a matrix, in its place: numpy's would take three times the memory.

    Raises LinAlgError if it is not positive definite.
    """
    for start in range(0, len(matrix), _FACTOR_BLOCK):
        stop = min(start + _FACTOR_BLOCK, len(matrix))
        matrix[start:, start:stop] -= matrix[start:, :start] @ matrix[start:stop, :start].T
        block = matrix[start:stop, start:stop] = np.linalg.cholesky(matrix[start:stop, start:stop])
        matrix[stop:, start:stop] = matrix[stop:, start:stop] @ np.linalg.inv(block).T
        matrix[start:stop, stop:] = 0
