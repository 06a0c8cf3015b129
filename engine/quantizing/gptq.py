"""Rounding a matrix to small integers: each weight to the nearest, or by GPTQ, so that its outputs change least.

The weight of output n and input k, in group `g = k // group_size`, becomes `scales[n, g] * (codes[n, k] - zeros[n,
g])`. GPTQ (https://arxiv.org/abs/2210.17323) rounds one input after the other, and lets those that follow make up for
the error so far. Scales and zeros are chosen before, so groups stay as they are in whatever order inputs are rounded.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..weights.dtypes import DType, bfloat16_bits
from .report import relative_error
from .statistics import InputStatistics

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]

DAMP = 0.01  # of the mean of the Hessian's diagonal is added to it
_BLOCK = 64  # inputs that are rounded before BLAS takes their errors to others
_FACTOR_BLOCK = 512
_PIECE = 1 << 18  # weights of some rows, which stay in the processor's cache during a search
_RANGES = np.linspace(1.0, 0.6, 17)  # parts of a group's range that scales are tried for
_REFINEMENTS = 2
_SMALLEST: dict[DType, float] = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126}
_LARGEST: dict[DType, float] = {"float16": 65504.0, "bfloat16": 3e38, "float32": 3e38}


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
    """Round a finite `weight [N, K]` to the grid, whose group size divides K.

    Scales are those with the least squared error, in which inputs count as the statistics say, and all the same without
    them. Inputs that were always 0 count a little too, because they need not be 0 in another text. With the `hessian`
    of the inputs codes are GPTQ's, else the nearest. The result does not depend on `threads`.
    """
    squares = None if statistics is None else statistics.squares.astype(np.float32)
    importance = np.ones(weight.shape[1], np.float32)
    if squares is not None and squares.any():
        importance = squares + np.float32(DAMP) * squares.mean()
    with ThreadPoolExecutor(threads) as pool:
        step = max(1, _PIECE // weight.shape[1])
        pieces = [weight[start : start + step] for start in range(0, len(weight), step)]
        found = list(pool.map(lambda piece: _search(piece, grid, importance), pieces))
    scales, zeros = (np.concatenate([piece[i] for piece in found]) for i in (0, 1))
    if hessian is None:
        codes, lost, whole = (np.concatenate([piece[i] for piece in found]) for i in (2, 3, 4))
        return RoundedMatrix(codes, scales, zeros, relative_error(lost.sum(), whole.sum()))
    codes, error = _gptq(weight, grid, scales, zeros, hessian)
    return RoundedMatrix(codes, scales, zeros, error)


def _search(
    rows: Floats, grid: Grid, importance: Floats
) -> tuple[Floats, Codes, Codes, NDArray[np.float64], NDArray[np.float64]]:
    """Scales, zeros and the nearest codes of some rows, and for each row the squared error and the square of all."""
    weight = rows.reshape(len(rows), -1, grid.group_size)
    importance = importance.reshape(-1, grid.group_size)
    low, high = np.minimum(weight.min(axis=-1), 0), np.maximum(weight.max(axis=-1), 0)
    if grid.symmetric:
        high = np.maximum(-low, high)
        low = -high

    def attempt(scales: Floats, zeros: Floats) -> tuple[Floats, Floats]:
        steps = _steps(weight, scales, zeros, grid)
        errors = steps * scales[..., np.newaxis]
        errors -= weight
        return steps, _weighted(errors, importance)

    best_scales, best_zeros, best_steps, best = low, low, weight, np.full(low.shape, np.inf, np.float32)

    def keep(scales: Floats, zeros: Floats) -> None:
        nonlocal best_scales, best_zeros, best_steps, best
        steps, error = attempt(scales, zeros)
        better = error < best
        best = np.where(better, error, best)
        best_scales, best_zeros = np.where(better, scales, best_scales), np.where(better, zeros, best_zeros)
        best_steps = np.where(better[..., np.newaxis], steps, best_steps)

    for part in _RANGES.astype(np.float32):
        scales = _storable((high - low) * (part / np.float32(grid.largest)), grid.scales)
        zeros = np.clip(np.rint(-low * part / scales), 0, grid.largest)
        keep(scales, np.full_like(zeros, grid.middle) if grid.symmetric else zeros)
    for _ in range(_REFINEMENTS):  # the best scale of the codes so far
        squares = _weighted(best_steps, importance)
        fitted = (best_steps * weight * importance).sum(axis=-1) / np.where(squares > 0, squares, 1)
        keep(_storable(np.where(squares > 0, fitted, best_scales), grid.scales), best_zeros)
    codes = (best_steps + best_zeros[..., np.newaxis]).astype(np.uint8).reshape(rows.shape)
    whole = _weighted(weight, importance).sum(axis=-1, dtype=np.float64)
    return best_scales, best_zeros.astype(np.uint8), codes, best.sum(axis=-1, dtype=np.float64), whole


def _steps(weight: Floats, scales: Floats, zeros: Floats, grid: Grid) -> Floats:
    """The nearest codes less their zeros, for groups `[N, G, group_size]`."""
    steps = weight / scales[..., np.newaxis]
    np.rint(steps, out=steps)
    low = -zeros[..., np.newaxis]
    return np.clip(steps, low, low + np.float32(grid.largest), out=steps)


def _weighted(values: Floats, importance: Floats) -> Floats:
    squares = np.square(values)
    squares *= importance
    total: Floats = squares.sum(axis=-1)
    return total


def _storable(scales: Floats, dtype: DType) -> Floats:
    """The scales as they are stored: above 0, because all are divided by."""
    scales = np.clip(scales, _SMALLEST[dtype], _LARGEST[dtype], dtype=np.float32)
    if dtype == "float16":
        return scales.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (bfloat16_bits(scales).astype(np.uint32) << 16).view(np.float32)
    return scales


def _gptq(weight: Floats, grid: Grid, scales: Floats, zeros: Codes, hessian: Hessian) -> tuple[Codes, float]:
    """The codes, and the error."""
    codes, originals, residuals = np.empty(weight.shape, np.uint8), weight.T, np.empty(weight.shape[1])
    rows = originals[hessian.order]  # one of each input: what is to be rounded, and once it is, the error
    scale_of, zero_of = np.ascontiguousarray(scales.T), zeros.T.astype(np.float32)
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
        factor, inputs = hessian.factor(start, stop, start, stop), hessian.order[start:stop]
        wanted, errors, block = rows[start:stop], originals[inputs], np.empty((stop - start, len(weight)), np.uint8)
        for i, group in enumerate(inputs // grid.group_size):
            wanted[i] += factor[:i, i] @ errors[:i]
            steps = np.rint(wanted[i] / scale_of[group])
            np.clip(steps, -zero_of[group], grid.largest - zero_of[group], out=steps)
            block[i] = steps + zero_of[group]
            steps *= scale_of[group]
            errors[i] -= steps
            wanted[i] -= steps
        residuals[start:stop] = np.square(wanted).sum(axis=1, dtype=np.float64)
        codes[:, inputs] = block.T
        rows[start:stop] = errors

    round_rows(0, len(rows))
    return codes, relative_error(hessian.undamped(float(hessian.weights @ residuals), rows), whole)


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
