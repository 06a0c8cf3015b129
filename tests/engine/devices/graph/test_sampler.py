"""The device's sampler picks the tokens that the numpy sampler picks."""

from __future__ import annotations

import numpy as np
import pytest

from tidewheel.engine.devices.batch import SamplingBatch
from tidewheel.engine.devices.sampling import NO_TOKEN, philox_uniform
from tidewheel.engine.devices.sampling import sample as reference

torch = pytest.importorskip("torch")

from tidewheel.engine.devices.graph.sampler import greedy, keep_by_sorting, sample  # noqa: E402
from tidewheel.engine.devices.graph.searching import keep_by_search  # noqa: E402

ROWS, VOCAB = 64, 1000


def batch_of(rows: int, **changes: float) -> SamplingBatch:
    batch = SamplingBatch.greedy(np.arange(rows))
    batch.seed[:] = np.arange(rows) * 7
    batch.temperature[:] = 1
    for name, value in changes.items():
        getattr(batch, name)[:] = value
    return batch


def on_device(logits: np.ndarray, batch: SamplingBatch, dtype: torch.dtype = torch.float64) -> list[int]:
    uniform = [philox_uniform(int(seed), int(p)) for seed, p in zip(batch.seed, batch.position, strict=True)]
    columns = np.array([batch.temperature, batch.top_k, batch.top_p, batch.min_p, uniform], np.float64)
    tokens: list[int] = sample(torch.from_numpy(logits), torch.from_numpy(columns).to(dtype)).tolist()
    return tokens


def logits_of(rows: int, vocab: int, scale: float) -> np.ndarray:
    return (np.random.default_rng(3).standard_normal((rows, vocab)) * scale).astype(np.float32)


@pytest.mark.parametrize("vocab", [3, 256, 257, VOCAB])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.3},
        {"temperature": 1e-37},
        {"top_k": 1},
        {"top_k": 20},
        {"top_p": 0.5},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"top_k": 50, "top_p": 0.8, "min_p": 0.01, "temperature": 1.7},
    ],
    ids=str,
)
def test_seeded_rows_draw_what_the_reference_draws(changes: dict[str, float], vocab: int) -> None:
    for scale in (0.1, 3.0):
        logits, batch = logits_of(ROWS, vocab, scale), batch_of(ROWS, **changes)
        assert on_device(logits, batch) == reference(logits, batch).token_ids.tolist()


def test_rows_of_a_batch_have_parameters_of_their_own() -> None:
    logits, batch = logits_of(ROWS, VOCAB, 2.0), batch_of(ROWS)
    random = np.random.default_rng(1)
    batch.temperature[:] = random.choice([0, 0.5, 2], ROWS)
    batch.top_k[:] = random.choice([0, 5], ROWS)
    batch.top_p[:] = random.choice([1, 0.7], ROWS)
    assert on_device(logits, batch) == reference(logits, batch).token_ids.tolist()


def test_equal_logits_go_to_the_lower_token() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    for changes in ({"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.01}):
        batch = batch_of(ROWS, **changes)
        tokens = on_device(logits, batch)
        assert tokens == reference(logits, batch).token_ids.tolist()
        assert max(tokens) <= 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [3, 257, VOCAB])
def test_a_search_keeps_the_tokens_that_a_sort_keeps(vocab: int, dtype: torch.dtype) -> None:
    random = np.random.default_rng(vocab)
    logits = random.standard_normal((ROWS, vocab)).astype(np.float32) * 3
    logits[::2] = np.round(logits[::2] * 2) / 2  # many equal weights
    weights = torch.from_numpy(logits - logits.max(-1, keepdims=True)).exp()
    weights[::5] = weights[::5].masked_fill(weights[::5] < 0.05, 0.0)
    top_k, top_p = random.choice([0, 1, 2, 20, vocab, vocab + 3], ROWS), random.choice([1, 1e-6, 0.3, 0.9, 0.99], ROWS)
    bounds = [torch.from_numpy(bound.astype(np.float64))[:, None].to(dtype) for bound in (top_k, top_p)]
    kept = keep_by_search(weights, *bounds)
    assert torch.equal(kept, keep_by_sorting(weights, *bounds))
    assert (kept > 0).any(-1).all()


def test_without_float64_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32)).repeat(2000, axis=0)
    tokens = on_device(logits, batch_of(2000), torch.float32)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 2000, [0.5, 0.25, 0.125, 0.125], atol=0.04)
    wide, batch = logits_of(ROWS, VOCAB, 2.0), batch_of(ROWS, top_k=40, top_p=0.9)
    assert on_device(wide, batch, torch.float32) == reference(wide, batch).token_ids.tolist()


def test_the_largest_uniform_number_gives_a_token_that_is_left() -> None:
    logits, batch = logits_of(8, 300, 1.0), batch_of(8, top_k=5)
    largest = np.full(8, 1 - 2.0**-53)
    columns = torch.from_numpy(np.array([batch.temperature, batch.top_k, batch.top_p, batch.min_p, largest]))
    for dtype in (torch.float64, torch.float32):
        for row, token in enumerate(sample(torch.from_numpy(logits), columns.to(dtype)).tolist()):
            assert token in np.argsort(-logits[row])[:5]


def test_a_row_without_a_finite_maximum_gets_no_token_and_harms_no_other() -> None:
    logits = np.zeros((4, 8), np.float32)
    logits[1], logits[2], logits[3, 2] = np.nan, -np.inf, np.inf
    assert greedy(torch.from_numpy(logits)).tolist() == [0, NO_TOKEN, NO_TOKEN, NO_TOKEN]
    batch = batch_of(4, top_k=1)
    assert on_device(logits, batch) == [0, NO_TOKEN, NO_TOKEN, NO_TOKEN]
