"""A device that runs ahead gets the next step before the last one's tokens are known, and no answer changes."""

from __future__ import annotations

import dataclasses

import pytest
from engine.driving import Driver, Job, alone
from engine.fake_executor import FakeExecutor

from tidewheel.engine.constraints.constraint import TokenConstraints
from tidewheel.engine.devices.limits import CacheGroup, ExecutorLimits
from tidewheel.engine.outputs import FinishReason
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.speculation.drafter import Draftable, Drafter

BLOCK = 4
LIMITS = ExecutorLimits(BLOCK, 64, 8, 64, async_scheduling=True)
MAX_LENGTH = 64
EOS = frozenset({0})


def job(max_tokens: int, first: int = 1, **options: object) -> Job:
    prompt = tuple(range(first, first + 5))
    return Job(prompt, SamplingParams(max_tokens=max_tokens, **options))  # type: ignore[arg-type]


def followed(*jobs: Job, limits: ExecutorLimits = LIMITS, drafter: Drafter | None = None) -> tuple[Driver, int]:
    """A driver after these jobs have run together, and how many steps did not wait for the one before."""
    executor = FakeExecutor(limits)
    driver = Driver(executor, MAX_LENGTH, EOS, drafter=drafter)
    keys = [driver.add(job)[0] for job in jobs]
    driver.run()
    roomy = dataclasses.replace(limits, async_scheduling=False)
    for key, wanted in zip(keys, jobs, strict=True):
        assert driver.sampled[key] == alone(FakeExecutor(roomy), MAX_LENGTH, wanted, 0, EOS)[0]
    return driver, executor.num_followed


def test_decodes_go_on_within_their_blocks() -> None:
    _, count = followed(job(40, ignore_eos=True))
    # The decodes run positions 5 to 43: all but the first one, and each block's first.
    assert count == 39 - 1 - len(range(8, 44, BLOCK))


def test_the_last_token_is_the_last_one() -> None:
    for max_tokens in range(1, 12):
        driver, _ = followed(job(max_tokens, ignore_eos=True))
        assert len(driver.tokens(0)) == max_tokens
        assert driver.finished[0].reason is FinishReason.LENGTH


def test_one_that_has_ended_leaves_the_others_their_tokens() -> None:
    tokens = [token for token, *_ in alone(FakeExecutor(LIMITS), MAX_LENGTH, job(30, ignore_eos=True), 0, EOS)[0]]
    for end in range(1, 12):
        driver, count = followed(job(30, stop_token_ids=(tokens[end],)), job(30, first=50, ignore_eos=True))
        assert driver.finished[0].reason is FinishReason.STOP
        assert count > 10


def test_one_that_is_aborted_meanwhile_gets_no_token() -> None:
    executor = FakeExecutor(LIMITS)
    driver = Driver(executor, MAX_LENGTH, EOS)
    (one,), (other,) = driver.add(job(30, ignore_eos=True)), driver.add(job(30, first=50, ignore_eos=True))
    while not executor.num_followed:
        driver.step()
    before = driver.tokens(one)
    driver.abort(one)
    driver.run()
    assert driver.tokens(one) == before
    assert driver.sampled[other] == alone(FakeExecutor(LIMITS), MAX_LENGTH, job(30, 50, ignore_eos=True), 0, EOS)[0]


def test_a_new_request_does_not_wait_for_long() -> None:
    executor = FakeExecutor(LIMITS)
    driver = Driver(executor, MAX_LENGTH, EOS)
    driver.add(job(40, ignore_eos=True))
    while not executor.num_followed:
        driver.step()
    (new,) = driver.add(job(3, first=50))
    driver.step()  # already begun
    driver.step()
    assert driver.tokens(new)


@pytest.mark.parametrize(
    "wanted",
    [
        Job((1, 2, 3), SamplingParams(max_tokens=20), constraints=TokenConstraints(allowed_token_ids=(5, 6, 7))),
        job(20, repetition_penalty=1.5),
        job(20, beam_width=2),
    ],
    ids=["constrained", "penalized", "beams"],
)
def test_what_depends_on_the_last_token_waits_for_it(wanted: Job) -> None:
    executor = FakeExecutor(LIMITS)
    driver = Driver(executor, MAX_LENGTH, EOS, vocab_size=256)
    driver.add(wanted)
    driver.run()
    assert executor.num_followed == 0


def test_stop_tokens_count_from_the_least_length_on() -> None:
    for min_tokens in range(1, 10):
        followed(job(20, min_tokens=min_tokens, stop_token_ids=tuple(range(10, 200))))


def test_a_drafter_and_recurrent_state_wait_for_each_step() -> None:
    class Silent:
        def propose(self, sequence: Draftable) -> list[int]:
            return []

    assert followed(job(20), drafter=Silent())[1] == 0
    assert followed(job(20), limits=dataclasses.replace(LIMITS, num_states=16))[1] == 0


def test_windows_move_on() -> None:
    limits = dataclasses.replace(LIMITS, window_groups=(CacheGroup(32, window=6),))
    _, count = followed(job(40, ignore_eos=True), job(40, first=50, ignore_eos=True), limits=limits)
    assert count > 10
