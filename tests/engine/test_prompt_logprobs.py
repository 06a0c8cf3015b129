"""Log-probabilities of prompts equal transformers', with any chunks and any part of the prompt in the cache."""

from __future__ import annotations

import dataclasses
import functools

import models_zoo
import numpy as np
import pytest
from engine.driving import Driver, Job, random_clock
from engine.fake_executor import FakeExecutor
from harness import device_ids, make_device
from optional_packages import require_packages

from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorLimits, ExecutorOptions
from tidewheel.engine.devices.sampling import NO_TOKEN
from tidewheel.engine.models import describe
from tidewheel.engine.outputs import FinishReason
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.weights import open_weights, read_config

torch = pytest.importorskip("torch")
require_packages("transformers")

PROMPT = tuple(np.random.default_rng(5).integers(0, models_zoo.VOCAB_SIZE, 45).tolist())
ROOMY = ExecutorLimits(4, 64, 8, 64)


@functools.cache
def executor(device_id: str) -> Executor:
    folder, device = models_zoo.folder("qwen3"), make_device(device_id)
    description = describe(read_config(folder), None)
    options = ExecutorOptions(
        dtype="float32",
        kv_cache_bytes=32 * 16 * device.kv_bytes_per_token(description.spec, "float32"),
        max_model_len=128,
        max_num_seqs=4,  # and so the device computes 4 rows of logits at a time
        max_num_batched_tokens=128,
    )
    return device.load(description.spec, open_weights(folder, description), options)


def scored(driver: Driver, sampling: SamplingParams) -> list[tuple[float, int, list[int], list[float]]]:
    """Log-probability, rank, and the most likely tokens and theirs, of every token of the prompt but the first."""
    (key, *_) = driver.add(Job(PROMPT, sampling))
    driver.run()
    assert [position for position, *_ in driver.scored[key]] == list(range(len(PROMPT) - 1))
    count = 4 * (sampling.prompt_logprobs or 0)
    return [
        (logprob, rank, np.frombuffer(top[:count], np.int32).tolist(), np.frombuffer(top[count:], np.float32).tolist())
        for _, logprob, rank, top in driver.scored[key]
    ]


@pytest.mark.parametrize("device_id", device_ids())
def test_they_are_those_of_transformers(device_id: str) -> None:
    driver = Driver(executor(device_id), 128)
    found = scored(driver, SamplingParams(max_tokens=0, prompt_logprobs=5))
    logits = torch.from_numpy(models_zoo.reference_logits("qwen3", PROMPT)).double()
    logprobs = torch.log_softmax(logits, -1).numpy()
    for position, (logprob, rank, top, top_logprobs) in enumerate(found):
        row, target = logprobs[position], PROMPT[position + 1]
        assert logprob == pytest.approx(row[target], abs=2e-4)
        assert rank == 1 + np.count_nonzero(row > row[target])
        assert top == np.argsort(-row, kind="stable")[:5].tolist()
        np.testing.assert_allclose(top_logprobs, row[top], atol=2e-4)


@pytest.mark.parametrize("device_id", device_ids()[:2])
def test_chunks_caches_and_company_do_not_show(device_id: str) -> None:
    sampling = SamplingParams(max_tokens=3, prompt_logprobs=2, n=2)
    tested = executor(device_id)
    expected = scored(Driver(tested, 128), sampling)
    schedules = [(13, 3, 2), (8, 4, 1), (128, 2, 3)]
    for num_tokens, num_seqs, seed in schedules[:1] if device_id == "torch" else schedules:
        limits = dataclasses.replace(
            tested.limits, num_blocks=12, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens
        )
        driver = Driver(tested, 128, clock=random_clock(seed), limits=limits)
        for _ in range(2):  # the second time the prompt is cached
            driver.add(Job(PROMPT[:20], SamplingParams(max_tokens=6), seed=seed))
            driver.step()
            assert scored(driver, sampling) == expected


def test_a_prompt_that_is_scored_is_computed_again_though_it_is_cached() -> None:
    driver = Driver(FakeExecutor(ROOMY), 64)
    for sampling in (SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, prompt_logprobs=0)):
        driver.add(Job(PROMPT[:13], sampling))
        driver.run()
    assert [step.load.prefill_tokens for step in driver.steps] == [13, 13]
    assert [step.load.scored_tokens for step in driver.steps] == [0, 12]


def test_what_was_scored_before_a_preemption_is_not_scored_again() -> None:
    driver = Driver(FakeExecutor(ExecutorLimits(4, 16, 1, 8)), 64)
    (key,) = driver.add(Job(PROMPT[:21], SamplingParams(max_tokens=1, prompt_logprobs=0), priority=1))
    driver.step()
    driver.add(Job(PROMPT[30:33], SamplingParams(max_tokens=1)))
    driver.run()
    assert driver.scheduler.preemptions_total == 1
    assert [position for position, *_ in driver.scored[key]] == list(range(20))
    assert sum(step.load.prefill_tokens for step in driver.steps) == 21 + 3, "the cache has what was scored"


def test_without_tokens_to_generate_every_choice_ends_with_the_prompt() -> None:
    driver = Driver(FakeExecutor(ROOMY), 16)
    keys = driver.add(Job(PROMPT[:16], SamplingParams(max_tokens=0, n=3)))  # the prompt fills the context
    driver.run()
    assert [driver.finished[key].reason for key in keys] == [FinishReason.LENGTH] * 3
    assert [driver.tokens(key) for key in keys] == [[]] * 3
    assert sum(step.load.prefill_tokens for step in driver.steps) == 16


def test_a_prompt_without_finite_logits_is_that_requests_error() -> None:
    class Broken(FakeExecutor):
        def step(self, batch):  # type: ignore[no-untyped-def]
            output = super().step(batch)
            if batch.sampling.target is not None:
                output.token_ids[np.flatnonzero(batch.sampling.target >= 0)[0]] = NO_TOKEN
            return output

    driver = Driver(Broken(ROOMY), 64)
    (fine,) = driver.add(Job(PROMPT[:9], SamplingParams(max_tokens=4, ignore_eos=True)))
    (broken,) = driver.add(Job(PROMPT[9:18], SamplingParams(max_tokens=4, prompt_logprobs=0)))
    driver.run()
    assert driver.finished[broken].reason is FinishReason.ERROR
    assert len(driver.tokens(fine)) == 4
