"""Batches of any kind on a warmed-up executor: nothing compiles, and each request gets its own tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine.devices.made_models import PLAIN, ROPE, VOCAB_SIZE, decoder
from engine.driving import Driver, Job, alone
from harness import Harness

from tidewheel.engine.devices.batch import SamplingBatch
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.sampling import sample
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.sampling_params import SamplingParams

jax = pytest.importorskip("jax")

TURNED = replace(PLAIN, rope=ROPE)
SPEC = decoder(TURNED, replace(TURNED, sliding_window=40))
MAX_LENGTH = 120


@pytest.fixture(scope="module")
def executor() -> Executor:
    from engine.devices.tpu.making import load

    # Pages of 16 tokens; a few sequences need more of them than there are.
    executor = load(SPEC, max_model_len=MAX_LENGTH, max_num_batched_tokens=32, num_tokens=700)
    executor.warm_up(lambda done, steps: None)
    return executor


def jobs(count: int, seed: int) -> list[Job]:
    """Requests of all kinds and lengths."""
    random = np.random.default_rng(seed)
    kinds = [
        {},
        {"temperature": 1.3},
        {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05, "logprobs": 2},
        {"frequency_penalty": 0.7, "temperature": 0.7},
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"n": 2, "temperature": 1.0},
    ]
    return [
        Job(
            tuple(random.integers(1, VOCAB_SIZE, random.integers(1, 90)).tolist()),
            SamplingParams(
                max_tokens=int(random.integers(6, 15)), ignore_eos=True, **kinds[(count * seed + i) % len(kinds)]
            ),
            seed=int(random.integers(1 << 62)),
        )
        for i in range(count)
    ]


# Two sizes of steps, the head and the copying are compiled first.
def test_a_storm_after_warm_up_compiles_nothing_and_mixes_nothing_up(executor: Executor) -> None:
    from engine.devices.tpu.making import Compilations

    driver = Driver(executor, MAX_LENGTH, vocab_size=VOCAB_SIZE)
    wanted: dict[int, tuple[Job, int]] = {}
    with Compilations() as compilations:
        for moment in range(2):
            for job in jobs(4, moment):
                wanted |= {key: (job, index) for index, key in enumerate(driver.add(job))}
            for _ in range(9):
                driver.step()
        driver.run()
    assert compilations.count == 0
    assert executor.late_compilations == 0  # type: ignore[attr-defined]
    assert any(step.is_async for step in driver.steps)
    assert any(step.rows.decodes and step.rows.chunks for step in driver.steps)
    for key, (job, index) in wanted.items():
        sampled, scored = alone(executor, MAX_LENGTH, job, index, frozenset())
        assert driver.tokens(key) == [token for token, *_ in sampled]
        for got, expected in ((driver.sampled[key], sampled), (driver.scored[key], scored)):
            logprobs = [[row[1] for row in rows if row[1] is not None] for rows in (got, expected)]
            np.testing.assert_allclose(*logprobs, rtol=1e-3, atol=1e-4)


def test_the_steps_are_the_same_on_the_torch_reference(executor: Executor) -> None:
    pytest.importorskip("torch")
    from engine.devices.made_models import load

    tokens = np.random.default_rng(3).integers(1, VOCAB_SIZE, 110).tolist()
    expected = Harness(load("torch", SPEC)).logits(tokens)
    np.testing.assert_allclose(Harness(executor).logits(tokens, chunk=30), expected, rtol=1e-3, atol=1e-3)


def test_copied_pages_continue_like_the_original(executor: Executor) -> None:
    harness = Harness(executor)
    prompt = list(range(1, 41))
    original = harness.start(prompt, 8)
    for _ in range(2):
        harness.step([original], chunk=20)
    copy = harness.start(prompt, 8)
    copy.tokens, copy.cached = list(original.tokens), original.cached
    for group, (old, new) in enumerate(zip(original.tables, copy.tables, strict=True)):
        executor.copy_blocks(np.array([old, new], np.int32).T.copy(), group)
    harness.step([original])
    harness.step([copy])
    np.testing.assert_array_equal(original.logits[-1], copy.logits[-1])


def test_padding_changes_no_page_of_others(executor: Executor) -> None:
    """Sequences that have all pages go on as they would have, though another's steps were padded meanwhile."""
    found = []
    for padded in (False, True):
        harness = Harness(executor)
        short = harness.start([5, 6, 7], 8)
        others = []
        while len(others) * 7 < executor.limits.num_blocks - 7:
            others.append(harness.start([len(others), *range(1, 25)], 80))
        harness.step(others, chunk=4)
        while any(sequence.cached < 24 for sequence in others):
            harness.step(others, chunk=4)
        for _ in range(3 if padded else 0):
            harness.step([short])
        harness.step(others)
        found.append([sequence.logits[-1] for sequence in others])
    np.testing.assert_array_equal(*found)


def test_a_chip_tells_what_it_can_do(executor: Executor) -> None:
    ceilings = executor.measure_ceilings("float32", 0.05)  # type: ignore[attr-defined]
    assert set(ceilings) == {"copy_bytes_per_second", "float32_flops"}
    assert all(0 < ceiling < float("inf") for ceiling in ceilings.values())


def test_a_closed_executor_says_so() -> None:
    from engine.devices.tpu.making import load

    executor = load(SPEC)
    executor.close()
    executor.close()
    with pytest.raises(DeviceError, match="closed"):
        executor.copy_blocks(np.zeros((0, 2), np.int32))
    with pytest.raises(DeviceError, match="closed"):
        Harness(executor).generate([[1]], 1)


def test_seeded_rows_draw_the_tokens_of_the_reference() -> None:
    from tidewheel.engine.devices.tpu.inputs import RowInputs
    from tidewheel.engine.devices.tpu.sampler import sample as sample_on_device

    rows, vocab = 400, 700
    random = np.random.default_rng(7)
    logits = (random.standard_normal((rows, vocab)) * 3).astype(np.float32)
    logits[:40] = np.round(logits[:40])  # ties
    logits[40, 3], logits[41, 3], logits[42] = np.nan, np.inf, -np.inf
    logits[43, 5:] = -np.inf
    batch = SamplingBatch.greedy(np.arange(rows))
    batch.seed[:] = random.integers(1 << 62, size=rows)
    batch.temperature[:] = random.choice([0.0, 0.3, 1.0, 2.5], rows)
    batch.top_k[:] = random.choice([0, 1, 5, 50, 900], rows)
    batch.top_p[:] = random.choice([1.0, 0.95, 0.5, 0.01], rows)
    batch.min_p[:] = random.choice([0.0, 0.1, 0.6], rows)
    expected = sample(logits, batch).token_ids

    from tidewheel.engine.devices.sampling import philox_uniform

    uniform = [philox_uniform(int(s), int(p)) for s, p in zip(batch.seed, batch.position, strict=True)]
    inputs = RowInputs(
        np.zeros(rows, np.int32),
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        np.array(uniform, np.float32),
        np.full(rows, -1, np.int32),
    )
    got = np.asarray(jax.jit(sample_on_device)(logits, inputs))
    assert got[40] == got[41] == got[42] == -1
    # A number that falls between the roundings of two sums is a matter of one in a million.
    np.testing.assert_array_equal(got, expected)
