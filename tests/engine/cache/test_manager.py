"""The cache manager's promises: what windows leave is free for others, states go on from snapshots, nothing shows."""

from __future__ import annotations

import dataclasses

import pytest
from engine.driving import METHODS, Driver, Job, Oracle, alone, check_schedule, drafter_of, random_clock
from engine.fake_executor import FakeExecutor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidewheel.engine.devices.limits import CacheGroup, ExecutorLimits
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.speculation.drafter import Draftable

BLOCK = 4
EOS = frozenset({0, 7})
MAX_LENGTH = 48  # tokens
ROOMY = ExecutorLimits(BLOCK, 64, 8, 64)


def job(length: int, max_tokens: int, *, first: int = 1, n: int = 1, beam_width: int | None = None) -> Job:
    prompt = tuple((first + i) % 200 for i in range(length))
    return Job(prompt, SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True, beam_width=beam_width))


def with_windows(limits: ExecutorLimits, windows: tuple[int | None, ...], *num_blocks: int) -> ExecutorLimits:
    first, *others = zip(num_blocks, windows, strict=True)
    groups = tuple(CacheGroup(count, window) for count, window in others)
    return dataclasses.replace(limits, num_blocks=first[0], window=first[1], window_groups=groups)


WINDOWS: list[tuple[int | None, ...]] = [(None,), (None, 6), (None, 13, 1), (9,), (None, 100), (17, 5)]

# Prompts of few kinds, so that they often share prefixes.
jobs = st.builds(
    lambda stem, tail, max_tokens, n, seed, scored: Job(
        (*range(stem), *tail),
        SamplingParams(max_tokens=max_tokens, temperature=1.0, n=n, ignore_eos=True, prompt_logprobs=scored),
        seed,
    ),
    st.integers(0, 30),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.sampled_from([1, 2, 5, 9, 30]),
    st.sampled_from([1, 1, 1, 2, 3]),
    st.integers(0, 3),
    st.sampled_from([None, None, None, 0]),
)


@st.composite
def executor_limits(draw: st.DrawFn) -> ExecutorLimits:
    windows = draw(st.sampled_from(WINDOWS))
    chunked = draw(st.booleans())
    limits = ExecutorLimits(
        block_size=BLOCK,
        num_blocks=1,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([1, 3, 6, 17, 64] if chunked else [48, 64])),
        mixed_steps=draw(st.booleans()),
        chunked_prefill=chunked,
    )
    if draw(st.booleans()):
        num_states = limits.max_num_seqs + draw(st.integers(0, 6))
        limits = dataclasses.replace(
            limits, num_states=num_states, max_draft_tokens=draw(st.sampled_from([0, 1, 3, 8]))
        )
    fewest = [
        MAX_LENGTH // BLOCK if window is None or not chunked else -(-(window - 1) // BLOCK) + 1 for window in windows
    ]
    return with_windows(limits, windows, *(count + draw(st.integers(0, 8)) for count in fewest))


# Each example computes each of its requests alone too.
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    executor_limits(),
    st.lists(st.tuples(st.lists(jobs, max_size=2), st.lists(st.integers(0, 99), max_size=1)), max_size=8),
    st.booleans(),
    st.integers(0, 1000),
    METHODS,
)
def test_any_schedule_samples_what_a_request_samples_alone(
    limits: ExecutorLimits,
    arrivals: list[tuple[list[Job], list[int]]],
    prefix_caching: bool,
    seed: int,
    method: str | None,
) -> None:
    oracle = Oracle(seed)
    drafter = None if limits.draft_limit == 0 else drafter_of(method, oracle)
    roomy = with_windows(ROOMY, tuple(group.window for group in limits.groups), *[64] * len(limits.groups))
    roomy = dataclasses.replace(roomy, num_states=8 if limits.num_states else 0)
    driver = Driver(FakeExecutor(limits), MAX_LENGTH, EOS, prefix_caching, random_clock(seed), drafter=drafter)
    check_schedule(driver, arrivals, lambda: FakeExecutor(roomy), oracle)


@pytest.mark.parametrize("num_states", [0, 8])
@pytest.mark.parametrize("windows", WINDOWS)
def test_beams_find_the_same_in_a_tight_cache(windows: tuple[int | None, ...], num_states: int) -> None:
    wanted = job(9, 20, n=2, beam_width=3)
    found = []
    for blocks in (64, 24):
        limits = with_windows(ROOMY, windows, *[blocks] * len(windows))
        limits = dataclasses.replace(limits, num_states=num_states)
        driver = Driver(FakeExecutor(limits), MAX_LENGTH, EOS, vocab_size=256)
        keys = driver.add(wanted)
        driver.add(job(20, 20, first=90))
        driver.run()
        found.append(driver.hypotheses(keys))
    assert len(found[0]) == 2
    assert found[0] == found[1]


def test_a_context_is_longer_than_the_blocks_of_its_window() -> None:
    limits = with_windows(ROOMY, (6,), 4)
    assert limits.max_context is None
    driver = Driver(FakeExecutor(limits), 200)
    (key,) = driver.add(job(90, 100))
    driver.run()
    assert len(driver.tokens(key)) == 100
    assert driver.scheduler.preemptions_total == 0


def test_blocks_behind_a_window_go_to_others() -> None:
    """Two sequences whose contexts take all of the first group need a few blocks each of the other."""
    limits = with_windows(ROOMY, (None, 6), 32, 2 * 4)
    driver = Driver(FakeExecutor(limits), 64)
    for first in (1, 100):
        driver.add(job(4, 60, first=first))
    driver.run()
    assert driver.scheduler.preemptions_total == 0


@pytest.mark.parametrize(("windows", "reused"), [((None, 6), 40), ((9,), 40), ((None, 30, 6), 40)])
def test_a_prefix_hit_needs_what_its_next_token_sees(windows: tuple[int | None, ...], reused: int) -> None:
    driver = Driver(FakeExecutor(with_windows(ROOMY, windows, *[64] * len(windows))), 64)
    for _ in range(2):
        driver.add(job(41, 1))
        driver.run()
    assert driver.scheduler.cached_prompt_tokens_total == reused


def test_a_prefix_whose_window_was_reused_is_cut_to_one_whose_was_not() -> None:
    """The second prompt shares 20 tokens with the first, the blocks before which have gone to others meanwhile."""
    driver = Driver(FakeExecutor(with_windows(ROOMY, (None, 6), 64, 5)), 64)
    prompt = tuple(range(40))
    driver.add(Job(prompt, SamplingParams(max_tokens=1)))
    driver.run()
    driver.add(Job((*prompt[:20], 99), SamplingParams(max_tokens=1)))
    driver.run()
    assert driver.scheduler.cached_prompt_tokens_total in range(20)
    driver.add(Job((*prompt, 99), SamplingParams(max_tokens=3)))
    driver.run()
    assert len(driver.finished) == 3


def test_the_longest_context_is_that_of_the_tightest_group() -> None:
    assert ROOMY.max_context == 256
    assert with_windows(ROOMY, (None, 6), 64, 4).max_context == 256
    assert with_windows(ROOMY, (None, 13), 64, 3).max_context == 12  # too few for one window
    whole = dataclasses.replace(with_windows(ROOMY, (6,), 4), chunked_prefill=False)
    assert whole.max_context == 16


class Told:
    """Drafts a sequence's next tokens, which it has been given, as many as are asked for."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def propose(self, sequence: Draftable) -> list[int]:
        return self._tokens[sequence.num_tokens - sequence.prompt_len :]


def recurrent(num_states: int = 16) -> ExecutorLimits:
    return dataclasses.replace(ROOMY, num_states=num_states)


def reused(driver: Driver, prompt: tuple[int, ...], max_tokens: int = 3) -> tuple[int, int]:
    """How many tokens of a prompt are found, and the sequence's key. It samples what it samples alone."""
    wanted = Job(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    (key,) = driver.add(wanted)
    before = driver.scheduler.cached_prompt_tokens_total
    driver.run()
    assert driver.sampled[key] == alone(FakeExecutor(recurrent()), 64, wanted, 0, frozenset())[0]
    return driver.scheduler.cached_prompt_tokens_total - before, key


@pytest.mark.parametrize("num_batched_tokens", [16, 64])
def test_a_prompt_goes_on_from_the_last_block_of_the_one_that_it_repeats(num_batched_tokens: int) -> None:
    """However its chunks were cut: what the first computes of the last 3 of 39 tokens is a step of its own."""
    driver = Driver(FakeExecutor(dataclasses.replace(recurrent(), max_num_batched_tokens=num_batched_tokens)), 64)
    prompt = tuple(range(100, 139))
    assert [reused(driver, prompt)[0] for _ in range(2)] == [0, 36]
    assert reused(driver, (*prompt, 7, 8, 9))[0] == 36


def test_a_snapshot_is_taken_where_a_prompt_parts_from_another() -> None:
    driver = Driver(FakeExecutor(recurrent()), 64)
    common = tuple(range(100, 122))  # 5 blocks and a half
    assert [reused(driver, (*common, *range(first, first + 18)))[0] for first in (1, 30, 60)] == [0, 0, 20]


@pytest.mark.parametrize("num_batched_tokens", [12, 64])
def test_prompts_that_come_at_once_wait_for_the_state_after_what_they_share(num_batched_tokens: int) -> None:
    driver = Driver(FakeExecutor(dataclasses.replace(recurrent(), max_num_batched_tokens=num_batched_tokens)), 64)
    common = tuple(range(100, 126))  # 6 blocks and a half
    prompts = [(*common, *range(first, first + 9)) for first in (1, 30, 60)]
    jobs = [Job(prompt, SamplingParams(max_tokens=3, ignore_eos=True)) for prompt in (*prompts, prompts[0])]
    keys = [driver.add(job)[0] for job in jobs]
    driver.run()
    assert driver.scheduler.cached_prompt_tokens_total == 24 + 24 + 32  # the last has a prompt of 35 in common
    for key, wanted in zip(keys, jobs, strict=True):
        assert driver.sampled[key] == alone(FakeExecutor(recurrent()), 64, wanted, 0, frozenset())[0]


def test_those_who_wait_for_a_state_go_on_when_it_will_never_be() -> None:
    driver = Driver(FakeExecutor(dataclasses.replace(recurrent(), max_num_batched_tokens=8)), 64)
    common = tuple(range(100, 140))
    keys = [driver.add(Job((*common, last), SamplingParams(max_tokens=3, ignore_eos=True)))[0] for last in (1, 2)]
    driver.step()
    driver.abort(keys[0])
    driver.run()
    assert len(driver.tokens(keys[1])) == 3


def test_a_snapshot_goes_along_with_a_decode() -> None:
    driver = Driver(FakeExecutor(recurrent(10)), 64)
    prompt = tuple(range(100, 106))
    _, key = reused(driver, prompt, 40)
    assert reused(driver, (*prompt, *driver.tokens(key)), 1)[0] == 32  # of 45: every fourth block end has one


def test_short_prompts_are_computed_in_one_step() -> None:
    driver = Driver(FakeExecutor(recurrent()), 64)
    assert [reused(driver, tuple(range(100, 115)))[0] for _ in range(2)] == [0, 0]
    assert max(step.load.prefill_tokens for step in driver.steps) == 15


def test_sequences_run_where_all_slots_are_theirs() -> None:
    driver = Driver(FakeExecutor(dataclasses.replace(ROOMY, num_states=2, max_num_seqs=2)), 64)
    keys = [driver.add(job(17, 5, first=first))[0] for first in (1, 1, 60, 60)]
    driver.run()
    assert [driver.tokens(key) for key in keys[::2]] == [driver.tokens(key) for key in keys[1::2]]


def test_forks_have_states_of_their_own() -> None:
    driver = Driver(FakeExecutor(recurrent()), 64)
    keys = driver.add(job(21, 9, n=4))
    driver.run()
    assert sum(step.load.prefill_tokens for step in driver.steps) == 21
    assert len({tuple(driver.tokens(key)) for key in keys}) == 4
    for index, key in enumerate(keys):
        assert driver.sampled[key] == alone(FakeExecutor(recurrent()), 64, job(21, 9, n=4), index, frozenset())[0]


def test_every_sequence_needs_a_state() -> None:
    with pytest.raises(ValueError, match="8 sequences need as many states"):
        recurrent(7)


def test_nothing_is_drafted_behind_which_a_state_cannot_go_back() -> None:
    with pytest.raises(ValueError, match="state cannot go back"):
        Driver(FakeExecutor(recurrent()), 64, drafter=Oracle(0))


@pytest.mark.parametrize("max_draft_tokens", [1, 3, 8])
def test_there_are_as_many_draft_tokens_as_a_state_can_go_back_behind(max_draft_tokens: int) -> None:
    limits = dataclasses.replace(recurrent(), max_draft_tokens=max_draft_tokens)
    wanted = job(21, 40)
    sampled = alone(FakeExecutor(limits), 64, wanted, 0, frozenset())[0]
    driver = Driver(FakeExecutor(limits), 64, drafter=Told([token for token, *_ in sampled]))
    (key,) = driver.add(wanted)
    driver.run()
    assert driver.sampled[key] == sampled
    assert max(len(draft.token_ids) for step in driver.steps for draft in step.rows.drafts) == 1 + max_draft_tokens
    assert len(driver.steps) <= 3 + 39 // max_draft_tokens  # some are cut where a snapshot is due


def test_a_snapshot_behind_draft_tokens_has_none_that_were_rejected() -> None:
    """Every fourth block end of a decode has one, and no step passes it.

    Half of the draft tokens before it are wrong.
    """
    limits = dataclasses.replace(recurrent(32), max_draft_tokens=5)
    wanted = job(21, 40)
    sampled = alone(FakeExecutor(limits), 64, wanted, 0, frozenset())[0]
    tokens = [token for token, *_ in sampled]
    for seed in range(20):
        oracle = Oracle(seed)
        driver = Driver(FakeExecutor(limits), 128, drafter=oracle)
        (key,) = driver.add(wanted)
        oracle.tell(key, tokens)
        driver.run()
        assert driver.sampled[key] == sampled
        again = Job((*wanted.prompt, *tokens), SamplingParams(max_tokens=3, ignore_eos=True))
        (follower,) = driver.add(again)
        before = driver.scheduler.cached_prompt_tokens_total
        driver.run()
        assert driver.sampled[follower] == alone(FakeExecutor(limits), 128, again, 0, frozenset())[0]
        assert driver.scheduler.cached_prompt_tokens_total - before == 52  # of 61; the prompt's own was after 20
