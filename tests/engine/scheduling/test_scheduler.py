"""The scheduler's promises: any schedule gives a request the tokens it gets alone, everything ends, limits hold."""

from __future__ import annotations

import pytest
from engine.driving import METHODS, Driver, Job, Oracle, check_schedule, drafter_of, random_clock
from engine.fake_executor import FakeExecutor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidewheel.engine.devices.limits import ExecutorLimits, StepShape
from tidewheel.engine.outputs import FinishReason
from tidewheel.engine.sampling_params import SamplingParams

BLOCK = 4
EOS = frozenset({0, 7})
ROOMY = ExecutorLimits(BLOCK, 64, 8, 64)


def job(length: int, max_tokens: int, *, first: int = 1, priority: int = 0, n: int = 1, seed: int = 0) -> Job:
    prompt = tuple((first + i) % 200 for i in range(length))
    return Job(prompt, SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True), seed, priority)


# Prompts of few kinds, so that they often share prefixes.
prompts = st.builds(
    lambda stem, tail: tuple(range(stem)) + tuple(tail), st.integers(0, 18), st.lists(st.integers(0, 3), max_size=8)
).filter(lambda prompt: 0 < len(prompt) < 24)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.sampled_from([None, 0, 1, 2, 5, 9, 20]))
    penalized, biased, stopping = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=draw(st.sampled_from([0.0, 1.0])),
        repetition_penalty=1.5 if penalized else 1.0,
        frequency_penalty=0.5 if penalized else 0.0,
        logit_bias={3: 5.0, 20: -100.0} if biased else {},
        stop_token_ids=tuple(range(10, 40)) if stopping else (),
        min_tokens=draw(st.sampled_from([0, 0, 3])) if max_tokens is None or max_tokens > 2 else 0,
        ignore_eos=draw(st.booleans()),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 5])),
    )


jobs = st.builds(
    Job, prompts, samplings(), st.integers(0, 3), st.sampled_from([0, 0, 0, -1, 5]), st.sampled_from([None, None, "a"])
)

executor_limits = (
    st.builds(
        ExecutorLimits,
        block_size=st.just(BLOCK),
        num_blocks=st.integers(8, 24),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([1, 3, 6, 17, 64]),
        mixed_steps=st.booleans(),
        chunked_prefill=st.just(True),
        async_scheduling=st.booleans(),
    )
    | st.builds(
        ExecutorLimits,
        block_size=st.just(BLOCK),
        num_blocks=st.integers(8, 24),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([1, 3, 6, 17, 64]),
        pipeline_stages=st.integers(2, 4),
    )
    | st.builds(
        ExecutorLimits,
        block_size=st.just(BLOCK),
        num_blocks=st.integers(8, 24),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([32, 40]),
        mixed_steps=st.booleans(),
        chunked_prefill=st.just(False),
        async_scheduling=st.booleans(),
    )
)


def shaped(
    num_sequences: list[int],
    query_lens: list[int],
    max_num_seqs: int,
    max_prefill_seqs: int | None,
    *,
    chunked: bool,
    async_scheduling: bool,
) -> ExecutorLimits:
    """A device that pads its steps."""
    shapes = tuple(StepShape(count, length) for count in num_sequences for length in query_lens if count * length <= 40)
    return ExecutorLimits(
        block_size=BLOCK,
        num_blocks=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=40,
        mixed_steps=False,
        chunked_prefill=chunked,
        max_prefill_seqs=max_prefill_seqs,
        async_scheduling=async_scheduling,
        shapes=shapes,
    )


executor_limits |= st.builds(
    shaped,
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.lists(st.sampled_from([1, 4, 8, 16, 32]), min_size=1, max_size=3),
    st.integers(1, 6),
    st.none() | st.integers(1, 3),
    chunked=st.booleans(),
    async_scheduling=st.booleans(),
)

# Before each of the first steps jobs arrive, and sequences are aborted: by a number, modulo those that there are.
moments = st.lists(st.tuples(st.lists(jobs, max_size=2), st.lists(st.integers(0, 99), max_size=1)), max_size=8)


@settings(max_examples=35, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(executor_limits, moments, st.booleans(), st.integers(0, 1000), METHODS)
def test_any_schedule_samples_what_a_request_samples_alone(
    limits: ExecutorLimits,
    arrivals: list[tuple[list[Job], list[int]]],
    prefix_caching: bool,
    seed: int,
    method: str | None,
) -> None:
    oracle = Oracle(seed)
    drafter = None if limits.shapes else drafter_of(method, oracle)
    max_length = 32  # tokens: all of the smallest pool
    driver = Driver(FakeExecutor(limits), max_length, EOS, prefix_caching, random_clock(seed), drafter=drafter)
    check_schedule(driver, arrivals, lambda: FakeExecutor(ROOMY), oracle)


def test_prompts_are_served_in_order_of_arrival() -> None:
    driver = Driver(FakeExecutor(ExecutorLimits(BLOCK, 64, 2, 64)), 64)
    keys = [driver.add(job(5, 3, first=10 * i))[0] for i in range(6)]
    driver.run()
    assert list(driver.finished) == keys


def test_a_lower_priority_value_runs_first_and_takes_the_place_of_a_higher_one() -> None:
    driver = Driver(FakeExecutor(ExecutorLimits(BLOCK, 64, 1, 64)), 64)
    (slow,) = driver.add(job(5, 10, priority=1))
    driver.step()
    driver.step()
    (urgent,) = driver.add(job(5, 3, first=50))
    (never_preempts_equals,) = driver.add(job(5, 3, first=90))
    driver.run()
    assert list(driver.finished) == [urgent, never_preempts_equals, slow]
    assert driver.scheduler.preemptions_total == 1
    assert len(driver.tokens(slow)) == 10


def test_the_youngest_is_preempted_when_blocks_run_out_and_keeps_its_tokens() -> None:
    limits = ExecutorLimits(BLOCK, 8, 8, 64)
    driver = Driver(FakeExecutor(limits), 32)
    old, young = (driver.add(job(8, 20, first=first))[0] for first in (1, 50))
    preempted_with = None
    while driver.step() is not None:
        if driver.scheduler.preemptions_total and preempted_with is None:
            preempted_with = driver.tokens(young)
            assert old not in driver.finished
    assert list(driver.finished) == [old, young]
    assert preempted_with
    assert driver.tokens(young)[: len(preempted_with)] == preempted_with
    assert len(driver.tokens(young)) == 20


def test_a_prompt_waits_for_room_without_being_overtaken() -> None:
    driver = Driver(FakeExecutor(ExecutorLimits(BLOCK, 8, 8, 64)), 32)
    first = driver.add(job(16, 4, first=1))[0]
    big = driver.add(job(28, 2, first=60))[0]
    small = driver.add(job(2, 1, first=120))[0]
    driver.run()
    assert list(driver.finished) == [first, big, small]
    assert driver.scheduler.preemptions_total == 0


def test_prompts_are_chunked_so_that_steps_with_decodes_stay_short() -> None:
    driver = Driver(
        FakeExecutor(ExecutorLimits(BLOCK, 512, 8, 256)), 1024, clock=lambda s: 2 + s.load.prefill_tokens / 8
    )
    driver.add(job(4, 200))
    driver.step()
    (long,) = driver.add(job(600, 2, first=90))
    while long not in driver.finished:
        step = driver.step()
        assert step is not None
        assert len(step.rows.decodes) >= 1
        assert step.load.prefill_tokens <= 96  # the clock's 10 ms are 64 tokens; a misjudged step may take more
    chunks = [chunk.num_tokens for step in driver.steps for chunk in step.rows.chunks if chunk.sequence.key == long]
    assert sum(chunks) == 600
    assert sum(chunks[2:-1]) / len(chunks[2:-1]) > 40, "the time a step may take is made use of"


def test_with_nothing_decoding_a_step_takes_all_the_tokens_it_may() -> None:
    driver = Driver(FakeExecutor(ExecutorLimits(BLOCK, 512, 8, 256)), 1024, clock=lambda step: 1e4)
    driver.add(job(600, 2))
    driver.run()
    assert [step.load.prefill_tokens for step in driver.steps[:3]] == [256, 256, 88]


def test_steps_of_one_kind_alternate_where_a_device_wants_them() -> None:
    driver = Driver(FakeExecutor(ExecutorLimits(BLOCK, 512, 8, 64, mixed_steps=False)), 1024)
    driver.add(job(4, 40))
    driver.step()
    driver.add(job(200, 2, first=90))
    driver.run()
    kinds = "".join("p" if step.rows.chunks else "d" for step in driver.steps)
    assert "dpdpdp" in kinds
    assert "pp" not in kinds


def test_whole_prompts_stay_whole_even_if_they_do_not_fit_beside_decodes() -> None:
    limits = ExecutorLimits(BLOCK, 512, 8, 64, chunked_prefill=False)
    driver = Driver(FakeExecutor(limits), 64)
    driver.add(job(4, 40))
    driver.step()
    (whole,) = driver.add(job(62, 2, first=90))
    driver.step()
    driver.step()
    assert len(driver.tokens(whole)) == 1


def test_choices_share_the_blocks_of_one_computed_prompt() -> None:
    driver = Driver(FakeExecutor(ROOMY), 64)
    keys = driver.add(job(21, 3, n=4))
    driver.run()
    assert sum(step.load.prefill_tokens for step in driver.steps) == 21
    assert [len(step.copies.get(0, ())) for step in driver.steps] == [0, 3, 0], (
        "the last holder of a block goes on with it"
    )
    assert len({tuple(driver.tokens(key)) for key in keys}) == 4, "choices have seeds of their own"


@pytest.mark.parametrize(("length", "copies"), [(20, 0), (21, 3)])
def test_choices_need_no_prefix_cache_to_share_their_prompt(length: int, copies: int) -> None:
    executor = FakeExecutor(ROOMY)
    driver = Driver(executor, 64, enable_prefix_caching=False)
    driver.add(job(length, 3, n=4))
    max_used = 0
    while driver.step():
        max_used = max(max_used, driver.cache.num_used)
    assert sum(step.load.prefill_tokens for step in driver.steps) == length
    assert executor.num_copies == copies
    assert max_used == 20 // BLOCK + 4


def test_choices_without_room_start_later_on_the_cached_prompt() -> None:
    driver = Driver(FakeExecutor(ExecutorLimits(BLOCK, 64, 3, 64)), 64)
    keys = driver.add(job(21, 3, n=8))
    driver.run()
    assert [len(driver.tokens(key)) for key in keys] == [3] * 8
    assert sum(step.load.prefill_tokens for step in driver.steps) == 21 + 5
    assert driver.scheduler.preemptions_total == 0


def test_requests_that_arrive_together_compute_their_common_prefix_once() -> None:
    driver = Driver(FakeExecutor(ROOMY), 64)
    stem = tuple(range(20))
    for tail in range(3):
        driver.add(Job((*stem, 100 + tail, 7), SamplingParams(max_tokens=2, ignore_eos=True)))
    driver.run()
    assert sum(step.load.prefill_tokens for step in driver.steps) == 22 + 2 + 2


def test_who_awaits_a_prefix_goes_on_when_its_maker_is_aborted() -> None:
    driver = Driver(FakeExecutor(ExecutorLimits(BLOCK, 64, 8, 8)), 64)
    maker, waiting = driver.add(job(40, 2, n=2))
    driver.step()
    assert driver.scheduler.num_waiting == 1
    driver.abort(maker)
    driver.run()
    assert len(driver.tokens(waiting)) == 2


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    driver = Driver(FakeExecutor(ROOMY), 64)
    for _ in range(2):
        driver.add(job(BLOCK * 3, 2))
        driver.run()
    assert [step.load.prefill_tokens for step in driver.steps if step.rows.chunks] == [12, 4]
    assert driver.scheduler.cached_prompt_tokens_total == 8


def test_different_salts_share_nothing() -> None:
    driver = Driver(FakeExecutor(ROOMY), 64)
    for salt in (None, "", "a", "b", "a"):
        driver.add(Job(tuple(range(16)), SamplingParams(max_tokens=1), cache_salt=salt))
        driver.run()
    assert [step.load.prefill_tokens for step in driver.steps] == [16, 16, 16, 16, 4]


def test_output_becomes_a_prefix_for_the_next_turn() -> None:
    driver = Driver(FakeExecutor(ROOMY), 64)
    (key,) = driver.add(job(6, 10))
    driver.run()
    turn = (*job(6, 10).prompt, *driver.tokens(key), 99)
    driver.add(Job(turn, SamplingParams(max_tokens=1)))
    driver.run()
    assert driver.scheduler.cached_prompt_tokens_total == 12  # 15 tokens were computed, the 16th only sampled


def test_stop_tokens_are_impossible_until_min_tokens_and_effective_after() -> None:
    sampling = SamplingParams(max_tokens=60, min_tokens=20, stop_token_ids=tuple(range(40)))
    driver = Driver(FakeExecutor(ExecutorLimits(BLOCK, 64, 8, 64)), 128, EOS)
    keys = [driver.add(Job((i,), sampling, seed=i))[0] for i in range(8)]
    driver.run()
    for key in keys:
        tokens = driver.tokens(key)
        assert all(token >= 40 for token in tokens[:20])
        assert len(tokens) > 20
        end = driver.finished[key]
        if end.reason is FinishReason.STOP:
            assert end.stop_reason == (None if tokens[-1] in EOS else tokens[-1])
    assert any(end.reason is FinishReason.STOP for end in driver.finished.values())


def test_aborted_sequences_that_never_ran_leave_no_trace() -> None:
    driver = Driver(FakeExecutor(ExecutorLimits(BLOCK, 64, 1, 64)), 64)
    (runs,) = driver.add(job(5, 400))
    driver.step()
    for i in range(500):
        driver.abort(driver.add(job(5, 3, first=i))[0])
    driver.run()
    assert len(driver.tokens(runs)) == 59
    assert driver.scheduler.num_waiting == 0


def test_padding_counts_as_tokens_of_a_step() -> None:
    shapes = (StepShape(1, 16), StepShape(2, 16), StepShape(4, 1))
    limits = ExecutorLimits(BLOCK, 64, 4, 40, mixed_steps=False, max_prefill_seqs=2, shapes=shapes)
    driver = Driver(FakeExecutor(limits), 64)
    for i in range(3):
        driver.add(job(9, 3, first=20 * i))
    driver.run()
    prefills = [step for step in driver.steps if step.rows.chunks]
    assert [(len(step.rows.chunks), step.load.prefill_tokens) for step in prefills] == [(2, 32), (1, 16)]
    assert {step.load.num_decodes for step in driver.steps if step.rows.decodes} == {4}
    with pytest.raises(ValueError, match="more than the 40 tokens"):
        ExecutorLimits(BLOCK, 64, 4, 40, shapes=(StepShape(3, 16),))


def test_the_time_of_prompts_that_are_not_computed_is_predicted_once_steps_have_taught_it() -> None:
    driver = Driver(FakeExecutor(ExecutorLimits(BLOCK, 64, 8, 8)), 64, clock=lambda step: 2.0 * step.rows.num_tokens)
    scheduler = driver.scheduler
    assert scheduler.prompts_left_ms() == 0.0
    driver.add(job(40, 2))
    assert scheduler.prompts_left_ms() is None
    for _ in range(4):
        driver.run()
        driver.add(Job(tuple(range(40 * len(driver.steps), 40 * len(driver.steps) + 40)), SamplingParams(max_tokens=2)))
    driver.add(job(40, 2, n=3))  # whose choices have one prompt
    left = scheduler.prompts_left_ms()
    assert left == pytest.approx(2.0 * 80, rel=0.3)
    driver.step()
    assert 0.0 < (scheduler.prompts_left_ms() or 0.0) < left
