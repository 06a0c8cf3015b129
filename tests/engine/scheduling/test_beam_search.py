"""Beam search finds what a plain search over the whole model finds, in any company, and leaves no trace in others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import models_zoo
import numpy as np
import pytest
from engine.driving import Driver, Job, alone, random_clock
from engine.fake_executor import FakeExecutor
from harness import device_ids, load, make_device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from optional_packages import require_packages
from samples import sample

from tidewheel.engine.devices.batch import StepBatch, StepOutput
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorLimits
from tidewheel.engine.devices.sampling import NO_TOKEN
from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.outputs import FinishReason
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.sequences.beam_search import Hypothesis

torch = pytest.importorskip("torch")
require_packages("transformers")

BLOCK = 4
ROOMY = ExecutorLimits(BLOCK, 256, 16, 64)
PROMPT = tuple(np.random.default_rng(1).integers(0, models_zoo.VOCAB_SIZE, 19).tolist())
Logprobs = Callable[[tuple[int, ...]], NDArray[np.float64]]


def exhaustive(
    logprobs_after: Logprobs, prompt: tuple[int, ...], sampling: SamplingParams, stop_ids: frozenset[int]
) -> list[tuple[float, list[int]]]:
    """The search as its definition has it, never ending early: scores and tokens of the `n` best."""
    assert sampling.beam_width is not None
    assert sampling.max_tokens is not None

    def score(total: float, tokens: list[int]) -> float:
        length = len(prompt) + len(tokens) - (tokens[-1] in stop_ids)
        return float(total / length**sampling.length_penalty)

    candidates = sampling.beam_width + max(sampling.beam_width, len(stop_ids))
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for step in range(sampling.max_tokens):
        longer = []
        for total, tokens in beams:
            after = logprobs_after((*prompt, *tokens))
            for token in np.argsort(-after, kind="stable")[:candidates].tolist():
                extended = (total + float(after[token]), [*tokens, token])
                if token not in stop_ids:
                    longer.append(extended)
                elif step >= sampling.min_tokens:
                    ended.append(extended)
        beams = sorted(longer, key=lambda beam: -beam[0])[: sampling.beam_width]
    scored = [(score(total, tokens), tokens) for total, tokens in ended + beams]
    return sorted(scored, key=lambda hypothesis: -hypothesis[0])[: sampling.n]


class RandomModel(FakeExecutor):
    """Log-probabilities are random, and depend on all of the context; so do those that `logprobs_after` tells."""

    def __init__(self, limits: ExecutorLimits = ROOMY, vocab_size: int = 32) -> None:
        super().__init__(limits, vocab_size)

    def logprobs_after(self, context: tuple[int, ...]) -> NDArray[np.float64]:
        return self._logprobs(np.array(context, np.int32).tobytes()).astype(np.float64)

    def _sample_row(self, batch: StepBatch, row: int, context: bytes, output: StepOutput) -> None:
        super()._sample_row(batch, row, context, output)
        count = int(batch.sampling.num_logprobs[row])
        if output.top_ids is not None and output.top_logprobs is not None and batch.sampling.temperature[row] == 0:
            logprobs = self._logprobs(context)
            best = np.argsort(-logprobs, kind="stable")[:count]
            output.top_ids[row, :count], output.top_logprobs[row, :count] = best, logprobs[best]

    def _logprobs(self, context: bytes) -> NDArray[np.float32]:
        logits = np.random.default_rng(list(context)).normal(0, 2, self.vocab_size)
        # Rounded, so that there are ties.
        return np.round(logits - np.log(np.exp(logits).sum()), 1).astype(np.float32)


def search(driver: Driver, sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> list[Hypothesis]:
    keys = driver.add(Job(prompt, sampling))
    driver.run()
    return driver.hypotheses(keys)


searches = st.builds(
    lambda width, fewer, **options: SamplingParams(beam_width=width, n=max(width - fewer, 1), **options),
    width=st.integers(1, 5),
    fewer=st.integers(0, 3),
    max_tokens=st.integers(1, 12),
    length_penalty=st.sampled_from([1.0, 0.0, 2.0, -1.0]),
    stop_token_ids=st.sampled_from([(), (3,), (1, 2, 3, 4)]),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 1]),
)


@settings(max_examples=50, deadline=None)
@given(searches, st.lists(st.integers(0, 31), min_size=1, max_size=9))
def test_the_best_are_found_though_the_search_ends_early(sampling: SamplingParams, prompt: list[int]) -> None:
    model = RandomModel()
    driver = Driver(model, 64, frozenset({0}), vocab_size=32)
    stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset({0}))
    found = search(driver, sampling, tuple(prompt))
    expected = exhaustive(model.logprobs_after, tuple(prompt), sampling, stop_ids)
    assert [hypothesis.token_ids for hypothesis in found] == [tokens for _, tokens in expected]
    np.testing.assert_allclose([hypothesis.score for hypothesis in found], [score for score, _ in expected], rtol=1e-6)
    for hypothesis in found:
        last = hypothesis.token_ids[-1]
        if last in stop_ids:
            assert hypothesis.finish_reason is FinishReason.STOP
            assert hypothesis.stop_reason == (None if last == 0 and not sampling.ignore_eos else last)
        else:
            assert hypothesis.finish_reason is FinishReason.LENGTH
            assert len(hypothesis.token_ids) == sampling.max_tokens


def test_a_search_ends_when_no_beam_can_become_better() -> None:
    class Eager(RandomModel):
        def _logprobs(self, context: bytes) -> NDArray[np.float32]:
            return np.array([-0.1, *[-6.0] * 31], np.float32)

    driver = Driver(Eager(), 64, frozenset({0}), vocab_size=32)
    found = search(driver, SamplingParams(beam_width=2, n=2, max_tokens=40, length_penalty=0.0), (5, 6))
    assert [len(hypothesis.token_ids) for hypothesis in found] == [1, 2]
    assert len(driver.steps) < 6


@functools.cache
def executor(device_id: str) -> Executor:
    return load(make_device(device_id), models_zoo.folder("qwen3"))


def reference_logprobs(context: tuple[int, ...]) -> NDArray[np.float64]:
    logits = torch.from_numpy(models_zoo.reference_logits("qwen3", context)[-1]).double()
    logprobs: NDArray[np.float64] = torch.log_softmax(logits, -1).numpy()
    return logprobs


@pytest.mark.parametrize("device_id", sample(device_ids(), device_ids()[:2].__contains__))
def test_a_model_is_searched_as_transformers_search_it(device_id: str) -> None:
    import transformers

    driver = Driver(executor(device_id), 256, vocab_size=models_zoo.VOCAB_SIZE)
    sampling = SamplingParams(beam_width=4, n=4, max_tokens=10, logprobs=2, length_penalty=0.0)
    found = search(driver, sampling)
    model = transformers.AutoModelForCausalLM.from_pretrained(models_zoo.folder("qwen3"), dtype=torch.float32)
    reference: Any = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=10,
        length_penalty=0.0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert [hypothesis.token_ids for hypothesis in found] == reference.sequences[:, len(PROMPT) :].tolist()
    np.testing.assert_allclose([h.score for h in found], reference.sequences_scores.numpy(), atol=1e-3)
    for hypothesis in found:
        assert hypothesis.logprobs is not None
        assert sum(entry.logprob for entry in hypothesis.logprobs) == pytest.approx(hypothesis.score, abs=1e-4)
        assert all(len(entry.top) == 2 for entry in hypothesis.logprobs)


def test_stop_tokens_and_length_penalties_on_a_model() -> None:
    stop_ids = frozenset(range(0, 300, 30))
    for length_penalty, temperature in ((1.0, 0.0), (2.0, 1.0), (-0.5, 2.0)):
        sampling = SamplingParams(
            beam_width=7,
            n=5,
            max_tokens=4,
            length_penalty=length_penalty,
            temperature=temperature,
            stop_token_ids=tuple(stop_ids),
        )
        driver = Driver(executor(device_ids()[-1]), 256, vocab_size=models_zoo.VOCAB_SIZE)
        found = search(driver, sampling)

        def tempered(context: tuple[int, ...], temperature: float = temperature or 1.0) -> NDArray[np.float64]:
            scaled = reference_logprobs(context) / temperature
            logprobs: NDArray[np.float64] = scaled - np.log(np.exp(scaled).sum())
            return logprobs

        expected = exhaustive(tempered, PROMPT, sampling, stop_ids)
        assert [h.token_ids for h in found] == [tokens for _, tokens in expected]
        np.testing.assert_allclose([h.score for h in found], [score for score, _ in expected], rtol=1e-4)


plain_jobs = st.builds(
    lambda length, max_tokens, n, seed, priority: Job(
        tuple(range(length)), SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True), seed, priority
    ),
    st.integers(1, 18),
    st.sampled_from([1, 5, 12]),
    st.sampled_from([1, 1, 3]),
    st.integers(0, 3),
    st.sampled_from([0, 0, -1, 1]),
)
beam_jobs = st.builds(
    lambda length, sampling, priority: Job(tuple(range(length)), sampling, 0, priority),
    st.integers(1, 14),
    searches.filter(lambda sampling: sampling.beam_width is not None and sampling.beam_width <= 3),
    st.sampled_from([0, 0, 1]),
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.lists(plain_jobs | beam_jobs, max_size=2), st.lists(st.integers(0, 99), max_size=1)), max_size=7
    ),
    st.integers(20, 30),
    st.integers(3, 8),
    st.sampled_from([8, 17, 64]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_searches_and_others_do_not_disturb_each_other(
    arrivals: list[tuple[list[Job], list[int]]],
    num_blocks: int,
    num_seqs: int,
    num_tokens: int,
    mixed_steps: bool,
    prefix_caching: bool,
    seed: int,
) -> None:
    # The largest search takes 3 beams of 26 tokens, 20 blocks.
    limits = ExecutorLimits(BLOCK, num_blocks, num_seqs, num_tokens, mixed_steps)
    driver = Driver(RandomModel(limits), 32, frozenset({0}), prefix_caching, random_clock(seed), vocab_size=32)
    owners: list[tuple[Job, list[int]]] = []
    for arriving, aborted in arrivals:
        owners += [(job, driver.add(job)) for job in arriving]
        for number in aborted:
            driver.abort(number)
        driver.step()
    driver.run()
    for job, keys in owners:
        if job.sampling.beam_width is None:
            for index, key in enumerate(keys):
                sampled, _ = alone(RandomModel(), 32, job, index, frozenset({0}))
                ended = driver.finished[key].reason is not FinishReason.ABORT
                assert driver.sampled[key] == (sampled if ended else sampled[: len(driver.sampled[key])])
        elif all(driver.finished[key].reason is not FinishReason.ABORT for key in keys[: job.sampling.n]):
            lonely = Driver(RandomModel(), 32, frozenset({0}), vocab_size=32)
            assert driver.hypotheses(keys) == search(lonely, job.sampling, job.prompt)


def test_beams_share_what_they_have_in_common() -> None:
    driver = Driver(RandomModel(), 256, vocab_size=32, enable_prefix_caching=False)
    driver.add(Job(tuple(range(30)) * 4, SamplingParams(beam_width=4, n=4, max_tokens=40)))
    max_used = 0
    while driver.step():
        max_used = max(max_used, driver.cache.num_used)
    assert sum(step.load.prefill_tokens for step in driver.steps) == 120
    assert max_used <= 120 // BLOCK + 4 * 40 // BLOCK
    assert driver.cache.num_used == 0


def test_a_preempted_search_starts_over_and_ends_the_same() -> None:
    sampling = SamplingParams(beam_width=3, n=3, max_tokens=12)
    limits = dataclasses.replace(ROOMY, num_blocks=16)
    driver = Driver(RandomModel(limits), 64, vocab_size=32)
    (old,) = driver.add(Job(tuple(range(25)), SamplingParams(max_tokens=39, ignore_eos=True)))
    keys = driver.add(Job(tuple(range(10, 23)), sampling))
    driver.run()
    assert driver.scheduler.preemptions_total >= 1
    assert len(driver.tokens(old)) == 39
    lonely = Driver(RandomModel(), 64, vocab_size=32)
    assert driver.hypotheses(keys) == search(lonely, sampling, tuple(range(10, 23)))


def test_a_model_without_finite_logits_ends_the_search_with_an_error() -> None:
    class Broken(RandomModel):
        def step(self, batch: StepBatch) -> StepOutput:
            output = super().step(batch)
            if self.num_steps == 4:
                output.token_ids[-1] = NO_TOKEN
            return output

    driver = Driver(Broken(), 64, vocab_size=32)
    keys = driver.add(Job((1, 2, 3), SamplingParams(beam_width=3, n=3, max_tokens=12)))
    driver.run()
    assert {driver.finished[key].reason for key in keys} == {FinishReason.ERROR}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"beam_width": 2, "n": 3}, "beam_width"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p"),
        ({"beam_width": 2, "stop": ("x",)}, "stop"),
        ({"beam_width": 2, "logit_bias": {1: 1.0}}, "logit_bias"),
        ({"beam_width": 2, "length_penalty": 21.0}, "length_penalty"),
        ({"length_penalty": 2.0}, "length_penalty"),
    ],
)
def test_what_has_no_place_in_a_search_is_refused(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError, match=param) as refusal:
        SamplingParams(**options)
    assert refusal.value.param == param
