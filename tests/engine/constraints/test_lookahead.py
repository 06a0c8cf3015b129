"""Drafts of constrained sequences:

what a grammar forces is drafted, and no draft token shows in anything but the steps.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from engine.constraints.grammars import grammar
from engine.driving import Driver, Job, Sampled, alone
from engine.fake_executor import FakeExecutor
from engine.tiny_tokenizers import tiny
from samples import swept

from tidewheel.engine.constraints.constraint import Preface, TokenConstraints
from tidewheel.engine.constraints.lookahead import Lookahead
from tidewheel.engine.constraints.lookahead_costs import LookaheadCosts
from tidewheel.engine.constraints.thinking_budget import ThinkingBudget
from tidewheel.engine.devices.limits import ExecutorLimits
from tidewheel.engine.outputs import FinishReason
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.speculation.drafter import Draftable

pytest.importorskip("llguidance")  # not there on every machine

VOCAB_SIZE = 320
EOS = frozenset({1})  # of the byte-level tokenizer
MAX_LENGTH = 96
ROOMY = ExecutorLimits(4, 128, 8, 64)
TOKENIZER = tiny("byte-level")
SCHEMA = {
    "type": "object",
    "properties": {"postal_code": {"enum": ["12345", "54321"]}, "street": {"type": "boolean"}},
    "required": ["postal_code", "street"],
    "additionalProperties": False,
}
REGEX = "(high|low) tide at (noon|dusk)"


def constrained(kind: str, text: str, *, seed: int = 0, sampling: dict[str, Any] | None = None, **more: Any) -> Job:
    wanted = TokenConstraints(grammar=grammar(kind, text, VOCAB_SIZE, EOS), **more)
    asked = {"max_tokens": 80, "logprobs": 2} | (sampling or {})
    return Job((5, 6, 7), SamplingParams(**asked), seed, constraints=wanted)


def fake() -> FakeExecutor:
    return FakeExecutor(ROOMY, VOCAB_SIZE)


class Told:
    """Proposes what a sequence is going to sample, six tokens at a time, every `wrong_each`th another one."""

    def __init__(self, tokens: list[int], wrong_each: int = 0) -> None:
        self.tokens = [(t + 1) % 256 if wrong_each and (i + 1) % wrong_each == 0 else t for i, t in enumerate(tokens)]

    def propose(self, sequence: Draftable) -> list[int]:
        start = sequence.num_tokens - sequence.prompt_len
        return self.tokens[start : start + 6]


def by_itself(job: Job) -> list[Sampled]:
    """What a job gets without drafts."""
    return alone(fake(), MAX_LENGTH, job, 0, EOS)[0]


def run(job: Job, drafter: Told | None = None, expected: list[Sampled] | None = None) -> Driver:
    """A driver after the job has got just what it gets without drafts."""
    driver = Driver(fake(), MAX_LENGTH, EOS, drafter=drafter)
    (key,) = driver.add(job)
    driver.run()
    assert driver.sampled[key] == (by_itself(job) if expected is None else expected)
    return driver


def drafted(driver: Driver) -> list[list[int]]:
    return [draft.token_ids[1:] for step in driver.steps for draft in step.rows.drafts]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("kind", "text"), [("json_schema", json.dumps(SCHEMA)), ("regex", REGEX)])
def test_what_a_grammar_forces_takes_no_step_of_its_own(kind: str, text: str, seed: int) -> None:
    driver = run(constrained(kind, text, seed=seed))
    tokens = driver.tokens(0)
    assert driver.finished[0].reason is FinishReason.STOP
    assert len(driver.steps) < len(tokens) * 0.8
    assert driver.scheduler.drafts is not None
    stats = driver.scheduler.drafts.stats
    assert stats.accepted_total == len(tokens) - len(driver.steps) > 0
    assert stats.accepted_total >= stats.draft_tokens_total - 1, "but for the last, after which nothing follows"


@pytest.mark.parametrize("seed", range(3))
def test_a_method_drafts_behind_what_is_forced(seed: int) -> None:
    job = constrained("json_schema", json.dumps(SCHEMA), seed=seed)
    alone_forced = run(job)
    both = run(job, Told(alone_forced.tokens(0)))
    assert both.tokens(0) == alone_forced.tokens(0)
    assert len(both.steps) < len(alone_forced.steps)


def test_a_forced_token_that_another_rule_forbids_ends_the_sequence() -> None:
    forbidden = drafted(run(constrained("regex", REGEX)))[0][1]
    driver = run(constrained("regex", REGEX, bad_words=((forbidden,),)))
    assert drafted(driver)
    assert driver.finished[0].reason is FinishReason.INVALID
    assert "contradict each other" in (driver.finished[0].error or "")


@pytest.mark.parametrize("wrong_each", [0, swept(1), 3])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"preface": Preface(("a",), is_open=True)},
        {"preface": Preface(("e",), opening_id=90)},
        {"bad_words": ((40,), (41, 42), (99, 101))},
        {"allowed_token_ids": tuple(range(300))},
        {
            "thinking": ThinkingBudget(5, ("<",), (">",), tuple(TOKENIZER.encode(">", add_special_tokens=False)), True),
            "preface": Preface((">",), is_open=True),
        },
    ],
    ids=lambda more: next(iter(more), "grammar"),
)
def test_draft_tokens_change_no_answer(more: dict[str, Any], wrong_each: int) -> None:
    asked = ({}, {"ignore_eos": True, "min_tokens": 20}, {"min_tokens": 6, "presence_penalty": 1})
    for seed, sampling in enumerate(asked):
        job = constrained("regex", "[a-f]{2,9}(, [a-f]+)*", seed=seed, sampling=sampling, **more)
        expected = by_itself(job)
        driver = run(job, Told([token for token, *_ in expected], wrong_each), expected)
        if wrong_each == 0 and len(expected) > 12:
            assert len(driver.steps) < len(expected) * 0.6


@pytest.mark.parametrize("seed", range(4))
def test_reasoning_may_end_within_a_draft(seed: int) -> None:
    """Bad words have masks before its end and behind it, so that the draft goes on."""
    job = constrained(
        "regex",
        "[b-f]{2,9}(, [b-f]+)*",
        seed=seed,
        preface=Preface(("a",), is_open=True),
        bad_words=((40,),),
    )
    expected = by_itself(job)
    assert drafted(run(job, Told([token for token, *_ in expected]), expected))


def test_a_draft_that_the_grammar_forbids_does_not_run() -> None:
    job = constrained("regex", "[a-f]{40,60}")
    expected = [token for token, *_ in by_itself(job)]
    outside = [TOKENIZER.encode("x", add_special_tokens=False)[0]]
    driver = run(job, Told(outside * len(expected)))
    assert drafted(driver) == []
    mixed = [outside[0] if i % 4 == 3 else token for i, token in enumerate(expected)]
    driver = run(job, Told(mixed))
    assert drafted(driver)
    assert not any(outside[0] in draft_tokens for draft_tokens in drafted(driver))


def test_nothing_is_kept_after_the_end_of_a_grammar() -> None:
    job = constrained("choice", '["ebb", "ebb tide", "flood"]')
    expected = [token for token, *_ in by_itself(job)]
    driver = run(job, Told([*expected, 40, 41, 42, 43]))
    assert driver.finished[0].reason is FinishReason.STOP


def test_sequences_with_and_without_constraints_run_together() -> None:
    jobs = [constrained("json_schema", json.dumps(SCHEMA), seed=seed) for seed in range(3)]
    jobs += [dataclasses.replace(jobs[0], constraints=None, seed=9), constrained("regex", REGEX, sampling={"n": 2})]
    driver = Driver(fake(), MAX_LENGTH, EOS)
    owners = {key: (job, index) for job in jobs for index, key in enumerate(driver.add(job))}
    driver.run()
    for key, (job, index) in owners.items():
        assert driver.sampled[key] == alone(fake(), MAX_LENGTH, job, index, EOS)[0]
    assert {draft.sequence.key for step in driver.steps for draft in step.rows.drafts} == owners.keys() - {3}


@pytest.mark.parametrize("failure", [None, BaseException("panic")])
def test_rows_whose_masks_are_missing_are_not_used(
    failure: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because there was no time for them, or because llguidance has failed."""

    def follow(*arguments: object) -> None:
        if failure is not None:
            raise failure

    monkeypatch.setattr(Lookahead, "follow", follow)
    driver = run(constrained("json_schema", json.dumps(SCHEMA)))
    assert drafted(driver)
    assert len(driver.steps) == len(driver.tokens(0))


def test_a_grammar_that_takes_long_gets_no_draft_for_a_while_and_then_longer() -> None:
    costs = LookaheadCosts()

    def pause() -> int:
        """How many drafts are left out once slow drafts have begun a pause."""
        assert costs.may_begin()
        while costs.may_begin():
            costs.charge(0.01, 1)
        count = 1
        while not costs.may_begin():
            count += 1
        return count

    first = pause()
    assert pause() == 2 * first
    for _ in range(1000):
        costs.charge(0.0004, 1)
        costs.charge(0.003, 8)
    assert costs.may_begin()


def test_a_slow_grammar_gets_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    job = constrained("json_schema", json.dumps(SCHEMA))
    assert job.constraints is not None
    assert job.constraints.grammar is not None
    monkeypatch.setattr(job.constraints.grammar, "lookahead", LookaheadCosts())
    job.constraints.grammar.lookahead.pause()
    assert drafted(run(job)) == []
