"""Rounding to small integers: the nearest that a grid has, and GPTQ's, whose outputs are nearer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidewheel import _native
from tidewheel.engine.quantizing.gptq import Grid, Hessian, RoundedMatrix, round_matrix
from tidewheel.engine.quantizing.statistics import InputStatistics
from tidewheel.engine.weights.dtypes import bfloat16_bits

Floats = NDArray[np.float32]

INT4, ZEROS, INT8 = Grid(4, 32, symmetric=True), Grid(4, 32, symmetric=False), Grid(8, 96, True, "bfloat16")
GRIDS = pytest.mark.parametrize("grid", [INT4, ZEROS, INT8], ids=["int4", "zeros", "int8"])


def values(matrix: RoundedMatrix, grid: Grid) -> Floats:
    """The weights that it stands for."""
    scales, zeros = (np.repeat(part, grid.group_size, axis=1) for part in (matrix.scales, matrix.zeros))
    return scales * (matrix.codes.astype(np.float32) - zeros)


def weights(outputs: int = 48, inputs: int = 96, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((outputs, inputs), np.float32)


def correlated(rows: int = 400, inputs: int = 96, seed: int = 1) -> Floats:
    """Inputs `[rows, inputs]` of different sizes, of which some tell much about others."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((rows, inputs // 6)) @ random.standard_normal((inputs // 6, inputs))
    mixed += 0.3 * random.standard_normal((rows, inputs))
    return (mixed * np.exp(random.standard_normal(inputs))).astype(np.float32)


def statistics_of(inputs: Floats) -> InputStatistics:
    gram = inputs.T @ inputs / len(inputs)
    return InputStatistics(len(inputs), gram.diagonal().copy(), gram)


def by_gptq(weight: Floats, grid: Grid, inputs: Floats) -> RoundedMatrix:
    statistics = statistics_of(inputs)
    assert statistics.gram is not None
    return round_matrix(weight, grid, statistics, Hessian(statistics.gram))


def output_error(matrix: RoundedMatrix, grid: Grid, weight: Floats, inputs: Floats) -> float:
    """The error of the outputs, relative to them."""
    lost, whole = ((inputs.astype(np.float64) @ w.T) for w in (values(matrix, grid) - weight, weight))
    return float(np.sqrt((lost**2).sum() / (whole**2).sum()))


@GRIDS
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1e-9, 1e-3, 1.0, 1e4]))
def test_codes_are_the_nearest_that_the_grid_has(grid: Grid, seed: int, size: float) -> None:
    weight = (weights(3, seed=seed) * size).astype(np.float32)
    matrix = round_matrix(weight, grid)
    best = np.full(weight.shape, np.inf)
    for code in range(2**grid.bits):
        at = values(replace(matrix, codes=np.full_like(matrix.codes, code)), grid)
        best = np.minimum(best, np.abs(at.astype(np.float64) - weight))
    step = np.repeat(matrix.scales, grid.group_size, axis=1)
    assert (np.abs(values(matrix, grid).astype(np.float64) - weight) <= best + 1e-6 * step).all()
    assert matrix.zeros.max() < 2**grid.bits
    if grid.symmetric:
        assert (matrix.zeros == 2 ** (grid.bits - 1)).all()


@GRIDS
def test_scales_are_numbers_of_their_type(grid: Grid) -> None:
    scales = round_matrix(weights(), grid).scales
    assert (scales > 0).all()
    if grid.scales == "bfloat16":
        assert not (scales.view(np.uint32) & 0xFFFF).any()
    else:
        np.testing.assert_array_equal(scales, scales.astype(np.float16))


@pytest.mark.parametrize("grid", [INT4, ZEROS])
def test_what_is_on_the_grid_stays(grid: Grid) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (8, 3, 32))
    codes[..., 0], codes[..., 1] = 0, 15
    zeros = np.full((8, 3, 1), 8) if grid.symmetric else random.integers(0, 16, (8, 3, 1))
    scales = (random.random((8, 3, 1)) + 0.5).astype(np.float16).astype(np.float32)
    weight = (scales * (codes - zeros)).astype(np.float32).reshape(8, 96)
    matrix = round_matrix(weight, grid)
    np.testing.assert_array_equal(values(matrix, grid), weight)
    assert matrix.error == 0


@GRIDS
def test_zeros_stay_zeros(grid: Grid) -> None:
    weight = weights()
    weight[3] = 0
    weight[:, 32:64] = 0
    for matrix in (round_matrix(weight, grid), round_matrix(np.zeros_like(weight), grid)):
        assert not values(matrix, grid)[3].any()
    assert matrix.error == 0


@GRIDS
def test_the_error_of_weights_is_measured(grid: Grid) -> None:
    weight = weights()
    matrix = round_matrix(weight, grid)
    lost = np.square(values(matrix, grid) - weight, dtype=np.float64).sum()
    assert matrix.error == pytest.approx(np.sqrt(lost / np.square(weight, dtype=np.float64).sum()), rel=1e-4)
    assert matrix.error < (0.12 if grid.bits == 4 else 0.01)


def by_trying(weight: Floats, grid: Grid, importance: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The scales, and the squared error of each group, in float64: of 17 parts of each group's range, the best one is
    fitted to its codes, twice.
    """
    groups = weight.reshape(len(weight), -1, grid.group_size).astype(np.float64)
    counts, largest = importance.reshape(-1, grid.group_size).astype(np.float64), 2**grid.bits - 1
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    if grid.symmetric:
        high = np.maximum(-low, high)
        low = -high

    def stored(scales: NDArray[np.float64]) -> NDArray[np.float64]:
        if grid.scales == "float16":
            return scales.astype(np.float16).astype(np.float64)
        bits = bfloat16_bits(scales.astype(np.float32)).astype(np.uint32)
        return (bits << 16).view(np.float32).astype(np.float64)

    def steps(scales: NDArray[np.float64], zeros: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.clip(np.rint(groups / scales[..., None]), -zeros[..., None], largest - zeros[..., None])

    best, best_zeros, least = np.ones(low.shape), np.zeros(low.shape), np.full(low.shape, np.inf)
    for attempt in [*np.linspace(1, 0.6, 17), "fit", "fit"]:
        if isinstance(attempt, str):
            codes, zeros = steps(best, best_zeros), best_zeros
            scales = stored((codes * groups * counts).sum(-1) / (codes**2 * counts).sum(-1))
        else:
            scales = stored((high - low) * attempt / largest)
            zeros = np.clip(np.rint(-low * attempt / scales), 0, largest)
            zeros = np.full(low.shape, 2.0 ** (grid.bits - 1)) if grid.symmetric else zeros
        error = ((steps(scales, zeros) * scales[..., None] - groups) ** 2 * counts).sum(-1)
        best, best_zeros = np.where(error < least, scales, best), np.where(error < least, zeros, best_zeros)
        least = np.minimum(error, least)
    return best, least


@GRIDS
def test_scales_are_the_best_of_many(grid: Grid) -> None:
    weight, squares = weights(200), np.exp(weights(1)[0])
    matrix = round_matrix(weight, grid, InputStatistics(100, squares))
    importance = squares + np.float32(0.01) * squares.mean()
    scales, errors = by_trying(weight, grid, importance)
    assert (matrix.scales == scales).mean() > 0.99  # two that are as good as each other may change places
    whole = (weight.astype(np.float64) ** 2 * importance).sum()
    assert matrix.error == pytest.approx(np.sqrt(errors.sum() / whole), rel=1e-5)


@GRIDS
def test_large_inputs_count_more(grid: Grid) -> None:
    weight, inputs = weights(), correlated()
    squares = replace(statistics_of(inputs), gram=None)
    apart = np.random.default_rng(2).standard_normal((2000, 96)).astype(np.float32) * np.sqrt(squares.squares)
    known = output_error(round_matrix(weight, grid, squares), grid, weight, apart)
    assert known < output_error(round_matrix(weight, grid), grid, weight, apart)


@GRIDS
def test_gptq_keeps_outputs_nearer(grid: Grid) -> None:
    weight, inputs = weights(), correlated()
    matrix = by_gptq(weight, grid, inputs)
    nearest = round_matrix(weight, grid, replace(statistics_of(inputs), gram=None))
    assert output_error(matrix, grid, weight, inputs) < 0.6 * output_error(nearest, grid, weight, inputs)
    assert matrix.error == pytest.approx(output_error(matrix, grid, weight, inputs), rel=1e-2)
    unseen = correlated(seed=1)[:100] + correlated(seed=1)[100:200]
    assert output_error(matrix, grid, weight, unseen) < output_error(nearest, grid, weight, unseen)


def by_the_paper(weight: Floats, gram: Floats, matrix: RoundedMatrix, grid: Grid) -> NDArray[np.uint8]:
    """Codes by the algorithm of https://arxiv.org/abs/2210.17323, an input at a time and in float64."""
    order = np.argsort(-gram.diagonal(), kind="stable")
    hessian = gram[np.ix_(order, order)].astype(np.float64)
    hessian += 0.01 * gram.diagonal().mean() * np.eye(len(gram))
    inverse = np.linalg.cholesky(np.linalg.inv(hessian)).T
    left, codes = weight[:, order].astype(np.float64), np.empty(weight.shape, np.uint8)
    for i, column in enumerate(order):
        scale, zero = (part[:, column // grid.group_size].astype(np.float64) for part in (matrix.scales, matrix.zeros))
        codes[:, column] = np.clip(np.rint(left[:, i] / scale) + zero, 0, 2**grid.bits - 1)
        error = (left[:, i] - scale * (codes[:, column] - zero)) / inverse[i, i]
        left[:, i:] -= np.outer(error, inverse[i, i:])
    return codes


@pytest.mark.parametrize("inputs", [96, 160, 288])
def test_codes_are_those_of_the_paper(inputs: int) -> None:
    weight, statistics = weights(40, inputs), statistics_of(correlated(2 * inputs, inputs))
    assert statistics.gram is not None
    for grid in (INT4, ZEROS, replace(INT8, group_size=inputs)):
        matrix = round_matrix(weight, grid, statistics, Hessian(statistics.gram))
        expected = by_the_paper(weight, statistics.gram, matrix, grid)
        # Sums in another order end on another side of a half now and then, and what follows in that row differs.
        same_rows = (matrix.codes == expected).all(axis=1)
        assert same_rows.mean() > (0.9 if grid.bits == 4 else 0.5)


@GRIDS
def test_inputs_that_have_nothing_in_common_are_rounded_to_the_nearest(grid: Grid) -> None:
    weight, squares = weights(), np.exp(weights(1)[0])
    statistics = InputStatistics(100, squares, np.diag(squares))
    matrix = round_matrix(weight, grid, statistics, Hessian(np.diag(squares)))
    np.testing.assert_array_equal(matrix.codes, round_matrix(weight, grid, statistics).codes)


@GRIDS
def test_inputs_that_were_always_0_are_rounded_to_the_nearest(grid: Grid) -> None:
    weight, inputs = weights(), correlated()
    inputs[:, [0, 5, 95]] = 0
    inputs[:, 32:64] = 0
    matrix = by_gptq(weight, grid, inputs)
    dead = [0, 5, *range(32, 64), 95]
    scales, zeros = (np.repeat(part, grid.group_size, axis=1)[:, dead] for part in (matrix.scales, matrix.zeros))
    nearest = np.clip(np.rint(weight[:, dead] / scales) + zeros, 0, 2**grid.bits - 1)
    np.testing.assert_array_equal(matrix.codes[:, dead], nearest)
    assert output_error(matrix, grid, weight, inputs) < 0.1


@GRIDS
def test_fewer_rows_than_inputs_are_enough(grid: Grid) -> None:
    weight, inputs = weights(), correlated(7)
    assert output_error(by_gptq(weight, grid, inputs), grid, weight, inputs) < 0.05


def test_a_gram_matrix_with_rounding_errors_is_damped_until_it_has_a_factor() -> None:
    statistics = statistics_of(correlated())
    assert statistics.gram is not None
    ordinary = Hessian(statistics.gram).damping
    eigenvalues, vectors = np.linalg.eigh(statistics.gram)
    eigenvalues[0] = -3 * ordinary
    hessian = Hessian((vectors * eigenvalues @ vectors.T).astype(np.float32))
    assert hessian.damping == pytest.approx(10 * ordinary, rel=1e-2)
    assert round_matrix(weights(), INT4, statistics, hessian).error < 0.2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gram_matrix_of_other_than_numbers_is_refused(bad: float) -> None:
    gram = np.eye(8, dtype=np.float32)
    gram[2, 3] = bad
    with pytest.raises(ValueError, match="not finite"):
        Hessian(gram)


def test_threads_change_nothing() -> None:
    weight, grid, statistics = weights(700, 384), replace(ZEROS, group_size=128), statistics_of(correlated(400, 384))
    assert statistics.gram is not None
    for hessian in (None, Hessian(statistics.gram)):
        one, four = (round_matrix(weight, grid, statistics, hessian, threads) for threads in (1, 4))
        np.testing.assert_array_equal(one.codes, four.codes)
        np.testing.assert_array_equal(one.scales, four.scales)
        assert one.error == four.error


@GRIDS
@pytest.mark.parametrize("level", _native.available_isa_levels())
def test_levels_store_the_same(level: str, grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, inputs = weights(75), correlated()
    expected = by_gptq(weight, grid, inputs)
    for name in ("search_grid", "round_inputs"):
        monkeypatch.setattr(_native, name, partial(getattr(_native, name), isa=level))
    found = by_gptq(weight, grid, inputs)
    for part in ("codes", "scales", "zeros"):
        np.testing.assert_array_equal(getattr(found, part), getattr(expected, part))
    assert found.error == expected.error


def test_arrays_that_do_not_fit_are_refused() -> None:
    ones, codes, sums = np.ones((2, 48), np.float32), np.zeros((2, 48), np.uint8), np.zeros(2)
    for groups, told in [(2, "multiple of 16"), (7, "multiple of 16"), (3, "shape of the matrix")]:
        scales, zeros = np.ones((2, groups), np.float32), np.zeros((2, 1), np.uint8)
        with pytest.raises(ValueError, match=told):
            _native.search_grid(ones, ones[0], 4, True, "float16", scales, zeros, codes, sums, sums)
    factor, residuals = np.ones((2, 2), np.float32), np.zeros((1, 2))
    for group, last, told in [(1, ones, "no such group"), (0, ones[:, :9].copy(), "shape of the block")]:
        with pytest.raises(ValueError, match=told):
            _native.round_inputs(
                ones, ones, factor, np.array([0, group], np.int32), ones[:1], last[:1], 4, codes, residuals
            )
