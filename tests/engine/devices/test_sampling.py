"""The sampler: the native one is the numpy one bit for bit, and both do what the parameters promise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidewheel import _native
from tidewheel.engine.devices.batch import SamplingBatch, StepOutput, TokenMasks
from tidewheel.engine.devices.sampling import NO_TOKEN, exp_nonpositive, log_positive, philox_uniform, sample

LEVELS = _native.available_isa_levels()


def batch_of(rows: int, **changes: object) -> SamplingBatch:
    """Plain sampling of `rows` rows at temperature 1; `changes` are scalars or arrays by field name."""
    batch = SamplingBatch.greedy(range(rows))
    batch.temperature[:] = 1
    batch.seed[:] = range(rows)
    batch.target, batch.logprob_temperature = np.full(rows, -1, np.int32), np.ones(rows, np.float32)
    for field in dataclasses.fields(batch):
        if field.name in changes:
            dtype = getattr(batch, field.name).dtype
            value = np.asarray(changes[field.name], dtype)
            setattr(batch, field.name, value if value.ndim else np.full(rows, value, dtype))
    if "target" not in changes:
        batch.target = None
    if "logprob_temperature" not in changes:
        batch.logprob_temperature = None
    return batch


def native_sample(level: str, logits: NDArray[np.float32], batch: SamplingBatch) -> StepOutput:
    output = StepOutput.empty(batch)
    _native.sample(
        level,
        logits,
        batch,
        output.token_ids,
        output.logprobs,
        output.ranks,
        output.top_ids,
        output.top_logprobs,
    )
    return output


def assert_equal(native: StepOutput, reference: StepOutput) -> None:
    np.testing.assert_array_equal(native.token_ids, reference.token_ids)
    if reference.logprobs is not None:
        assert native.logprobs is not None
        assert native.top_logprobs is not None
        assert reference.top_logprobs is not None
        np.testing.assert_array_equal(native.logprobs.view(np.int32), reference.logprobs.view(np.int32))
        np.testing.assert_array_equal(native.top_ids, reference.top_ids)
        np.testing.assert_array_equal(native.top_logprobs.view(np.int32), reference.top_logprobs.view(np.int32))
    if reference.ranks is not None:
        np.testing.assert_array_equal(native.ranks, reference.ranks)


def masks_of(*allowed: object, index: list[int] | None = None, words: int | None = None) -> TokenMasks:
    """A mask for each array of booleans [vocab], for the rows in order unless `index` says otherwise."""
    bits = np.array(allowed, np.bool_)
    padded = np.ones((len(bits), 32 * (words or -(-bits.shape[1] // 32))), np.bool_)
    padded[:, : bits.shape[1]] = bits
    packed = np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)
    return TokenMasks(packed, np.array(range(len(bits)) if index is None else index, np.int32))


def drawn_masks(draw: st.DrawFn, rng: np.random.Generator, rows: int, vocab: int) -> TokenMasks:
    """Masks of all densities, shared by rows or not there; their last word's unused bits, and a word more, are set."""
    shares = [draw(st.sampled_from([0.0, 0.001, 0.3, 0.999, 1.0])) for _ in range(rows)]
    allowed = [rng.random(vocab) < share for share in shares]
    index = [draw(st.integers(-1, rows - 1)) for _ in range(rows)]
    return masks_of(*allowed, index=index, words=-(-vocab // 32) + draw(st.integers(0, 1)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[NDArray[np.float32], SamplingBatch]:
    rows = draw(st.integers(1, 4))
    vocab = draw(st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 1000, 5003]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(0, draw(st.sampled_from([0.01, 1.0, 5.0, 60.0])), (rows, vocab)).astype(np.float32)
    if draw(st.booleans()):  # ties
        logits = np.round(logits)
    if draw(st.booleans()):
        logits[rng.random(logits.shape) < 0.3] = -np.inf
    if draw(st.integers(0, 9)) == 0:
        logits[0, 0] = draw(st.sampled_from([np.nan, np.inf]))

    def column(values: list[float]) -> list[float]:
        return [draw(st.sampled_from(values)) for _ in range(rows)]

    lengths = [draw(st.sampled_from([0, 0, 7, 40])) for _ in range(rows)]
    biases = [min(vocab, draw(st.sampled_from([0, 0, 3]))) for _ in range(rows)]
    bias_ids = [rng.choice(vocab, n, replace=False) for n in biases]
    batch = batch_of(
        rows,
        temperature=column([0, 0.1, 1.0, 1.7]),
        top_k=column([0, 1, 5, 70, 600, 6000]),
        top_p=column([1, 0.9, 0.5, 0.01]),
        min_p=column([0, 0.05, 1.0]),
        seed=rng.integers(0, 2**64, rows, np.uint64),
        position=rng.integers(0, 2**31, rows),
        repetition_penalty=column([1, 1.3, 0.7]),
        presence_penalty=column([0, 0.5, -1]),
        frequency_penalty=column([0, 0.25, -2]),
        num_logprobs=column([-1, 0, 1, 20, 300]),
        history_start=np.cumsum([0, *lengths]),
        history_ids=rng.integers(0, vocab, sum(lengths)),
        prompt_len=[rng.integers(0, n + 1) for n in lengths],
        bias_start=np.cumsum([0, *biases]),
        bias_ids=np.concatenate(bias_ids),
        bias_values=rng.choice([-np.inf, -100, 3.5, 100], sum(biases)),
    )
    if draw(st.booleans()):
        batch.target = np.array([draw(st.sampled_from([-1, 0, vocab - 1, vocab // 2])) for _ in range(rows)], np.int32)
    if draw(st.booleans()):
        batch.logprob_temperature = np.array(column([1.0, 0.5, 3.0, 1e-30]), np.float32)
    if draw(st.booleans()):
        batch.masks = drawn_masks(draw, rng, rows, vocab)
    return logits, batch


@settings(max_examples=150, deadline=None)
@given(cases())
def test_native_agrees_with_numpy_to_the_bit(case: tuple[NDArray[np.float32], SamplingBatch]) -> None:
    logits, batch = case
    reference = sample(logits, batch)
    for level in LEVELS:
        assert_equal(native_sample(level, logits, batch), reference)


@st.composite
def large_cases(draw: st.DrawFn) -> tuple[NDArray[np.float32], SamplingBatch]:
    """One row of a large vocabulary, whose logits and filters are of the kinds that are hard to select from."""
    vocab = draw(st.sampled_from([152064, 151937]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.sampled_from(["normal", "rounded", "constant", "ramp", "peak", "sparse"]))
    logits = rng.normal(0, draw(st.sampled_from([1e-4, 0.01, 1.0, 4.0, 30.0])), vocab)
    if shape == "rounded":
        logits = np.round(logits)
    elif shape == "constant":
        logits[:] = draw(st.sampled_from([0, -1e30, 3]))
    elif shape == "ramp":  # down to the underflow of the exponential; neighbours share blocks
        logits = np.linspace(0, -95, vocab)[:: draw(st.sampled_from([1, -1]))]
    elif shape == "peak":
        logits[draw(st.integers(0, vocab - 1))] += draw(st.sampled_from([5, 50, 500]))
    elif shape == "sparse":
        logits[rng.random(vocab) < 0.9999] = -np.inf
    if draw(st.integers(0, 9)) == 0:
        logits[draw(st.integers(0, vocab - 1))] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    history = rng.integers(0, vocab, draw(st.sampled_from([0, 0, 3000])))
    bias_ids = rng.choice(vocab, draw(st.sampled_from([0, 0, 300])), replace=False)
    batch = batch_of(
        1,
        temperature=draw(st.sampled_from([0, 1e-37, 0.3, 1, 1, 1.7, 100])),
        top_k=draw(st.sampled_from([0, 0, 0, 1, 2, 50, 594, 595, 5000, vocab - 1, vocab + 1])),
        top_p=draw(st.sampled_from([1, 1 - 2**-24, 0.999, 0.9, 0.5, 1e-6])),
        min_p=draw(st.sampled_from([0, 0, 0, 1e-37, 1e-3, 0.5, 1])),
        seed=rng.integers(0, 2**64, 1, np.uint64),
        repetition_penalty=draw(st.sampled_from([1, 1.3])),
        frequency_penalty=draw(st.sampled_from([0, 0.25, -2])),
        num_logprobs=draw(st.sampled_from([-1, 0, 1, 20])),
        history_start=[0, len(history)],
        history_ids=history,
        prompt_len=[len(history) // 2],
        bias_start=[0, len(bias_ids)],
        bias_ids=bias_ids,
        bias_values=rng.choice([-np.inf, -100, 3.5, 100], len(bias_ids)),
    )
    if draw(st.integers(0, 2)) == 0:
        batch.masks = drawn_masks(draw, rng, 1, vocab)
    return logits.astype(np.float32)[None], batch


@settings(max_examples=20, deadline=None)
@given(large_cases())
def test_native_agrees_on_a_large_vocabulary(case: tuple[NDArray[np.float32], SamplingBatch]) -> None:
    logits, batch = case
    reference = sample(logits, batch)
    for level in LEVELS:
        assert_equal(native_sample(level, logits, batch), reference)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_every_seed_draws_from_the_same_tokens(data: st.DataObject) -> None:
    """Rows that differ in the seed alone see the edge of what is kept, where the draw of one would rarely fall."""
    vocab = data.draw(st.sampled_from([3, 100, 257, 700, 3001]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(0, data.draw(st.sampled_from([0.01, 0.1, 1.0])), vocab).astype(np.float32)
    if data.draw(st.booleans()):  # ties
        logits = np.round(logits, data.draw(st.sampled_from([0, 1])))
    rows = 100
    logits = logits[None].repeat(rows, axis=0)
    batch = batch_of(
        rows,
        top_k=data.draw(st.integers(0, vocab)),
        top_p=data.draw(st.floats(2**-7, 1, width=32)),
        min_p=data.draw(st.sampled_from([0, 0, 0.01, 0.9])),
    )
    reference = sample(logits, batch)
    for level in LEVELS:
        assert_equal(native_sample(level, logits, batch), reference)


def test_exponential_and_logarithm_are_accurate() -> None:
    x = -np.linspace(0, 87, 100_001).astype(np.float32)
    np.testing.assert_allclose(exp_nonpositive(x), np.exp(x.astype(np.float64)), rtol=3e-7)
    assert exp_nonpositive(np.array([-87.5, -np.inf], np.float32)).tolist() == [0, 0]
    for value in np.logspace(-30, 30, 200):
        assert log_positive(value) == pytest.approx(float(np.log(value)), rel=1e-15, abs=1e-15)


def test_philox_matches_its_published_vectors() -> None:
    # Random123's known answers for philox4x32-10, whose first two words make the 53 bits.
    def expected(low: int, high: int) -> float:
        return float(((high << 32 | low) >> 11) * 2.0**-53)

    assert philox_uniform(0, 0) == expected(0x6627E8D5, 0xE169C58D)
    draws = [philox_uniform(7, position) for position in range(4000)]
    assert 0.48 < float(np.mean(draws)) < 0.52
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("level", LEVELS)
def test_draws_follow_the_distribution(level: str) -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32)).repeat(4000, axis=0)
    tokens = native_sample(level, logits, batch_of(4000, seed=5)).token_ids
    shares = np.bincount(tokens, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.125, 0.125], atol=0.03)


def test_what_each_filter_leaves() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32)).repeat(500, axis=0)

    def drawn(**changes: object) -> set[int]:
        return set(sample(logits, batch_of(500, **changes)).token_ids.tolist())

    assert drawn() == {0, 1, 2, 3}
    assert drawn(temperature=0) == {0}
    assert drawn(temperature=1e-37) == {0}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.65) == {0, 1}
    assert drawn(min_p=0.45) == {0, 1, 2}
    every = {"bias_start": np.arange(501), "bias_ids": np.zeros(500, np.int32)}
    assert drawn(**every, bias_values=np.full(500, -np.inf)) == {1, 2, 3}
    assert drawn(**every, bias_values=np.full(500, 100.0)) == {0}


def test_penalties_count_prompt_and_output_as_documented() -> None:
    logits = np.array([[2.0, 2.0, 2.0, -2.0]], np.float32)
    history = {"history_start": [0, 3], "history_ids": [0, 1, 1], "prompt_len": [1]}

    def greedy(**changes: object) -> int:
        return int(sample(logits, batch_of(1, temperature=0, **history, **changes)).token_ids[0])

    assert greedy() == 0
    assert greedy(repetition_penalty=1.5) == 2  # prompt and output alike
    assert greedy(presence_penalty=0.5) == 0  # the prompt's token is not output
    assert sample(logits, batch_of(1, temperature=0, history_start=[0, 2], history_ids=[0, 1], prompt_len=[0],
                                   frequency_penalty=0.5)).token_ids[0] == 2  # fmt: skip


def test_a_row_without_a_finite_maximum_gets_no_token_and_harms_no_other() -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[1] = np.nan
    logits[2] = -np.inf
    for level in LEVELS:
        tokens = native_sample(level, logits, batch_of(3, temperature=0)).token_ids
        assert tokens.tolist() == [0, NO_TOKEN, NO_TOKEN]


def test_a_minimum_probability_above_one_would_leave_nothing() -> None:
    with pytest.raises(ValueError, match="min_p"):
        native_sample(LEVELS[0], np.zeros((1, 8), np.float32), batch_of(1, min_p=1.5))


def test_a_target_is_reported_on_and_no_token_drawn() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.2, 0.5]], np.float32))
    plain = batch_of(1, temperature=0, num_logprobs=0)
    batch = plain.with_targets(np.array([1], np.int32), np.array([2], np.int32))
    for output in (sample(logits, batch), *(native_sample(level, logits, batch) for level in LEVELS)):
        assert output.token_ids.tolist() == [0, 1]
        assert output.logprobs is not None
        assert output.top_ids is not None
        assert output.ranks is not None
        np.testing.assert_allclose(output.logprobs, np.log([0.4, 0.2]), rtol=1e-6)
        assert output.top_ids[1].tolist() == [3, 1]
        assert output.ranks[1] == 2, "ties do not count"


def test_log_probabilities_of_tempered_logits() -> None:
    logits = np.random.default_rng(3).normal(0, 3, (2, 50)).astype(np.float32)
    batch = batch_of(2, temperature=0, num_logprobs=50, logprob_temperature=[0.5, 2])
    output = sample(logits, batch)
    assert output.top_ids is not None
    for row, temperature in enumerate((0.5, 2)):
        scaled = logits[row].astype(np.float64) / temperature
        expected = np.sort(scaled - np.log(np.exp(scaled).sum()))[::-1]
        np.testing.assert_allclose(output.top_logprobs[row], expected, rtol=1e-5)


def test_targets_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        native_sample(LEVELS[0], np.zeros((1, 8), np.float32), batch_of(1, target=8))


@pytest.mark.parametrize("level", LEVELS)
def test_a_mask_forbids_whatever_else_is_asked(level: str) -> None:
    logits = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32).repeat(100, axis=0)
    batch = batch_of(100, bias_start=np.arange(101), bias_ids=np.zeros(100), bias_values=np.full(100, 100.0))
    batch.masks = masks_of([False, True, False, True], index=[0] * 99 + [-1])
    output = native_sample(level, logits, batch)
    assert set(output.token_ids[:99].tolist()) == {1, 3}
    assert output.token_ids[99] == 0  # a row without a mask
    batch.temperature[:] = 0
    batch.num_logprobs[:] = 2
    output = native_sample(level, logits, batch)
    assert output.token_ids.tolist() == [1] * 99 + [0]
    assert output.top_ids is not None
    assert output.top_ids[:, :2].tolist() == [[0, 1]] * 100  # of the raw logits, forbidden tokens included
    batch.masks = masks_of([False] * 4, index=[0] * 100)
    assert native_sample(level, logits, batch).token_ids.tolist() == [NO_TOKEN] * 100


def test_masks_are_waited_for() -> None:
    batch = batch_of(1, temperature=0)
    masks = batch.masks = masks_of([True] * 40)

    def finish() -> None:
        masks.bits[:] = 1 << 7

    masks.written = finish
    logits = np.zeros((1, 40), np.float32)
    assert native_sample(LEVELS[0], logits, batch).token_ids[0] == 7
    masks.bits[:] = 0xFFFFFFFF
    assert sample(logits, batch).token_ids[0] == 7


def test_masks_that_do_not_fit_never_reach_a_kernel() -> None:
    logits, batch = np.zeros((2, 40), np.float32), batch_of(2)
    good = masks_of([True] * 40, index=[0, -1])
    for bits, index, message in (
        (good.bits[:, :1].copy(), good.index, "a bit for every token"),
        (good.bits, good.index[:1], "one entry a row"),
        (good.bits, np.array([0, 1], np.int32), "a mask that does not exist"),
        (good.bits, np.array([0, -2], np.int32), "a mask that does not exist"),
        (good.bits.astype(np.int32), good.index, "uint32"),
        (good.bits[0], good.index, "two-dimensional"),
    ):
        batch.masks = TokenMasks(bits, index)
        with pytest.raises(ValueError, match=message):
            native_sample(LEVELS[0], logits, batch)
