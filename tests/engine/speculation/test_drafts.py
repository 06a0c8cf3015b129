"""Drafted tokens make steps fewer and change nothing else: not a token, not a block that others find cached."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from engine.driving import Driver, Job, alone
from engine.fake_executor import FakeExecutor

from tidewheel.engine.cost_model import StepLoad
from tidewheel.engine.devices.limits import ExecutorLimits
from tidewheel.engine.outputs import FinishReason
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.speculation.drafter import Draftable
from tidewheel.engine.speculation.suffix import SuffixDrafter
from tidewheel.engine.speculation.suffix_options import SuffixOptions

BLOCK = 4
ROOMY = ExecutorLimits(BLOCK, 64, 8, 64)
MAX_LENGTH = 64
EOS = frozenset({0})


class Script:
    """Proposes the next `count` tokens of a script, whatever was sampled; every `wrong_each`th is another token."""

    def __init__(self, tokens: list[int], count: int, wrong_each: int = 0) -> None:
        self.tokens = [(t + 1) % 256 if wrong_each and (i + 1) % wrong_each == 0 else t for i, t in enumerate(tokens)]
        self.count = count

    def propose(self, sequence: Draftable) -> list[int]:
        start = sequence.num_tokens - sequence.prompt_len
        return self.tokens[start : start + self.count]


def job(max_tokens: int | None = 20, prompt: tuple[int, ...] = (1, 2, 3, 4, 5), **options: object) -> Job:
    return Job(prompt, SamplingParams(max_tokens=max_tokens, **options))  # type: ignore[arg-type]


def tokens_of(wanted: Job) -> list[int]:
    return [token for token, *_ in alone(FakeExecutor(ROOMY), MAX_LENGTH, wanted, 0, EOS)[0]]


def drafted(wanted: Job, script: Script, limits: ExecutorLimits = ROOMY) -> tuple[Driver, int]:
    """A driver after a job has run with drafts, and the job's key."""
    driver = Driver(FakeExecutor(limits), MAX_LENGTH, EOS, drafter=script)
    (key,) = driver.add(wanted)
    driver.run()
    return driver, key


@pytest.mark.parametrize("count", [1, 3, 7])
def test_right_drafts_give_as_many_tokens_more_a_step(count: int) -> None:
    wanted = job(21)
    expected = tokens_of(wanted)
    driver, key = drafted(wanted, Script(expected, count))
    assert driver.tokens(key) == expected
    assert len(driver.steps) == 1 + -(-20 // (count + 1))
    assert driver.scheduler.generation_tokens_total == 21


@pytest.mark.parametrize("wrong_each", [1, 2, 3, 5])
def test_nothing_after_a_rejected_token_is_kept(wrong_each: int) -> None:
    wanted = job(21, logprobs=2)
    expected = alone(FakeExecutor(ROOMY), MAX_LENGTH, wanted, 0, EOS)[0]
    driver, key = drafted(wanted, Script([token for token, *_ in expected], 4, wrong_each))
    assert driver.sampled[key] == expected
    assert driver.scheduler.generation_tokens_total == 21
    if wrong_each == 1:
        assert len(driver.steps) == 21


def test_max_tokens_are_not_passed() -> None:
    longer = tokens_of(job(30))
    for max_tokens in range(1, 12):
        driver, key = drafted(job(max_tokens), Script(longer, 5))
        assert driver.tokens(key) == longer[:max_tokens]
        assert driver.finished[key].reason is FinishReason.LENGTH


def test_the_context_is_not_passed() -> None:
    driver, key = drafted(job(None, ignore_eos=True), Script(tokens_of(job(None, ignore_eos=True)), 7))
    assert len(driver.tokens(key)) == MAX_LENGTH - 5


def test_a_stop_token_within_a_draft_ends_the_sequence_there() -> None:
    longer = tokens_of(job(30))
    for stop_at in range(1, 12):
        stop = longer[stop_at]
        first = longer.index(stop)
        driver, key = drafted(job(30, stop_token_ids=(stop,)), Script(longer, 5))
        assert driver.tokens(key) == longer[: first + 1]
        assert driver.finished[key].stop_reason == stop


def test_stop_tokens_stay_forbidden_until_min_tokens() -> None:
    wanted = job(30, min_tokens=9, stop_token_ids=tuple(range(128)))
    expected = tokens_of(wanted)
    driver, key = drafted(wanted, Script(expected, 4))
    assert driver.tokens(key) == expected
    assert len(driver.tokens(key)) >= 9
    assert len(driver.steps) < 5


def test_rejected_draft_tokens_are_never_found_in_the_cache() -> None:
    """What is cached are the blocks of a run without drafts."""
    wanted = job(22)
    expected = tokens_of(wanted)
    for wrong_each in (0, 1, 2, 3):
        driver, _ = drafted(wanted, Script(expected, 6, wrong_each))
        (again,) = driver.add(job(4, (*wanted.prompt, *expected, 9), seed=None))
        assert driver.scheduler.cached_prompt_tokens_total == 0
        driver.run()
        assert driver.scheduler.cached_prompt_tokens_total == 24  # 26 tokens were computed, the 27th only sampled
        assert driver.tokens(again) == tokens_of(job(4, (*wanted.prompt, *expected, 9)))


@pytest.mark.parametrize("wrong_each", [0, 2, 3])
@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5, "temperature": 0.0},
        {"frequency_penalty": 1.2, "temperature": 1.5},
        {"logit_bias": {7: 4.0, 9: 6.0}, "frequency_penalty": 0.9, "min_tokens": 9, "stop_token_ids": tuple(range(99))},
    ],
    ids=str,
)
def test_each_row_of_a_draft_knows_the_tokens_before_it(asked: dict[str, object], wrong_each: int) -> None:
    """Penalties count the draft tokens before a row, and no others. Biases are for the row's position."""
    wanted = job(21, prompt=(1, 2, 3, 2, 1), logprobs=2, **asked)
    expected = alone(FakeExecutor(ROOMY), MAX_LENGTH, wanted, 0, EOS)[0]
    assert len(expected) > 8
    driver, key = drafted(wanted, Script([token for token, *_ in expected], 4, wrong_each))
    assert driver.sampled[key] == expected
    assert len(driver.steps) < (len(expected) if wrong_each else len(expected) // 2)


def test_beams_get_no_draft_beside_others_that_do() -> None:
    plain = job(20)
    expected = tokens_of(plain)
    driver = Driver(FakeExecutor(ROOMY), MAX_LENGTH, EOS, drafter=Script(expected, 3), vocab_size=256)
    (key,) = driver.add(plain)
    keys = driver.add(job(8, beam_width=2, n=2))
    driver.run()
    lonely = Driver(FakeExecutor(ROOMY), MAX_LENGTH, EOS, vocab_size=256)
    assert driver.hypotheses(keys) == lonely_search(lonely, job(8, beam_width=2, n=2))
    assert driver.tokens(key) == expected
    assert {draft.sequence.key for step in driver.steps for draft in step.rows.drafts} == {key}


def lonely_search(driver: Driver, wanted: Job) -> list[object]:
    keys = driver.add(wanted)
    driver.run()
    return list(driver.hypotheses(keys))


def test_drafts_take_only_blocks_and_tokens_that_are_left() -> None:
    """In a pool that is just large enough without drafts, no sequence is preempted for a draft."""
    limits = dataclasses.replace(ROOMY, num_blocks=14, max_num_batched_tokens=8)
    jobs = [job(20, (i, i + 1, i + 2, i + 3)) for i in (10, 50)]
    driver = Driver(FakeExecutor(limits), 24, drafter=Script([7] * 40, 6))
    keys = [driver.add(wanted)[0] for wanted in jobs]
    driver.run()
    assert driver.scheduler.preemptions_total == 0
    assert any(step.rows.drafts for step in driver.steps)
    for key, wanted in zip(keys, jobs, strict=True):
        assert driver.tokens(key) == [t for t, *_ in alone(FakeExecutor(ROOMY), 24, wanted, 0, frozenset())[0]]


def test_drafts_do_not_make_steps_longer_than_they_may_be() -> None:
    expected = tokens_of(job(59, ignore_eos=True))
    driver = Driver(
        FakeExecutor(ROOMY), MAX_LENGTH, drafter=Script(expected, 8), clock=lambda step: 2.5 * step.load.num_tokens
    )
    for i in range(3):
        driver.add(job(59, (1, 2, 3, 4, i)))
        driver.run()
    assert all(step.load.num_tokens <= 5 for step in driver.steps[-8:-1]), "10 ms are 4 tokens"


def drafted_of(driver: Driver) -> list[int]:
    """How many tokens were drafted in each step."""
    return [sum(len(draft.token_ids) - 1 for draft in step.rows.drafts) for step in driver.steps]


def test_who_drafts_what_is_rejected_drafts_little() -> None:
    """What a row more costs is known: a twentieth of a step."""
    wanted = job(59, ignore_eos=True)
    expected = tokens_of(wanted)

    def cost_ms(load: StepLoad) -> float:
        return 1.0 + 0.05 * load.num_tokens

    never = drafted_with(cost_ms, Script(expected, 8, 1), wanted)
    assert sum(drafted_of(never)[30:]) <= 4
    always = drafted_with(cost_ms, Script(expected, 8), wanted)
    assert len(always.steps) < 12
    assert always.tokens(0) == never.tokens(0) == expected


def drafted_with(cost_ms: Callable[[StepLoad], float], script: Script, wanted: Job) -> Driver:
    """A driver that knows what steps cost, after a job has run in it with drafts."""
    driver = Driver(FakeExecutor(ROOMY), MAX_LENGTH, clock=lambda step: cost_ms(step.load), drafter=script)
    for load in (StepLoad(1, 10), StepLoad(4, 40), StepLoad(8, 100)) * 20:
        driver.cost_model.observe(load, cost_ms(load))
    driver.add(wanted)
    driver.run()
    return driver


def test_little_is_drafted_where_a_row_costs_as_much_as_a_token() -> None:
    """Then a draft token that is wrong now and then is a loss."""
    wanted = job(20)
    driver = drafted_with(lambda load: 0.5 * load.num_tokens, Script(tokens_of(wanted), 4, 2), wanted)
    assert sum(drafted_of(driver)) <= 3
    assert driver.tokens(0) == tokens_of(wanted)


def test_what_a_row_costs_is_known_before_and_soon_after_the_first_draft() -> None:
    """A row costs as much as a token.

    Who thinks that it costs nothing draft tokens in all steps, and learns it too late.
    """
    wanted = job(59, ignore_eos=True)
    script = Script(tokens_of(wanted), 8, 3)
    driver = Driver(
        FakeExecutor(ROOMY), MAX_LENGTH, clock=lambda step: 1.5 * step.load.num_tokens, drafter=script, is_fresh=True
    )
    driver.cost_model.max_step_ms = 1000.0
    for _ in range(4):
        driver.add(wanted)
    driver.run()
    counts = drafted_of(driver)
    first = next(i for i, step in enumerate(driver.steps) if step.load.num_decodes and not step.load.prefill_tokens)
    assert counts[first] == 0 < counts[first + 1]
    assert sum(counts[first + 2 :]) <= 8


def test_nobody_is_asked_where_there_is_no_room() -> None:
    wanted = job(20, ignore_eos=True)
    asked: list[int] = []

    class Asking(Script):
        def propose(self, sequence: Draftable) -> list[int]:
            asked.append(sequence.key)
            return super().propose(sequence)

    driver = Driver(FakeExecutor(ROOMY), MAX_LENGTH, EOS, drafter=Asking(tokens_of(wanted), 40))
    for _ in range(3):
        driver.add(wanted)
    driver.run()
    drafts = [draft.sequence.key for step in driver.steps for draft in step.rows.drafts]
    assert asked
    assert len(asked) <= len(drafts) + len(driver.steps)


def test_nothing_is_drafted_while_too_many_decode() -> None:
    wanted = job(20, ignore_eos=True)
    expected = tokens_of(wanted)
    driver = Driver(FakeExecutor(ROOMY), MAX_LENGTH, EOS, drafter=Script(expected, 4), max_drafted=1)
    for max_tokens in (20, 8):
        driver.add(job(max_tokens, ignore_eos=True))
    driver.run()
    counts = [(len(step.rows.decodes) + len(step.rows.drafts), bool(step.rows.drafts)) for step in driver.steps]
    assert not any(has_drafts for running, has_drafts in counts if running > 1)
    assert any(has_drafts for _, has_drafts in counts)


def test_what_became_of_drafts_is_counted() -> None:
    wanted = job(21)
    driver, _ = drafted(wanted, Script(tokens_of(wanted), 3, 2))
    assert driver.scheduler.drafts is not None
    stats = driver.scheduler.drafts.stats
    drafts = [draft for step in driver.steps for draft in step.rows.drafts]
    assert (stats.drafts_total, stats.draft_tokens_total) == (len(drafts), sum(drafted_of(driver)))
    assert 0 < stats.accepted_total < stats.draft_tokens_total
    assert stats.accepted_total == 20 - (len(driver.steps) - 1)


def test_a_draft_is_a_load() -> None:
    expected = tokens_of(job(10))
    driver, _ = drafted(job(10), Script(expected, 3))
    load = driver.steps[1].load
    assert (load.num_decodes, load.num_tokens) == (4, 4)
    assert load.decode_pairs == 6 + 7 + 8 + 9


def test_an_earlier_answer_is_drafted_for_the_same_salt_until_it_is_forgotten() -> None:
    driver = Driver(FakeExecutor(ROOMY), MAX_LENGTH, EOS, drafter=SuffixDrafter(8, SuffixOptions()))
    wanted = job(40, ignore_eos=True, logprobs=1)
    expected = alone(FakeExecutor(ROOMY), MAX_LENGTH, wanted, 0, EOS)[0]

    def num_steps(wanted: Job) -> int:
        before = len(driver.steps)
        (key,) = driver.add(wanted)
        driver.run()
        assert driver.sampled[key] == expected
        return len(driver.steps) - before

    assert num_steps(wanted) == 40
    assert num_steps(wanted) < 12
    assert num_steps(dataclasses.replace(wanted, cache_salt="another client's")) == 40
    driver.scheduler.forget()
    assert num_steps(wanted) == 40
