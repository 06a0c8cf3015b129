"""Draft tokens are made where they save time, on made-up machines whose time passes as the test says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import pytest
from engine.driving import Driver, Job
from engine.fake_executor import FakeExecutor

from tidewheel.engine.devices.limits import ExecutorLimits
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.scheduling.step import Step
from tidewheel.engine.speculation.budget import SpeculationBudget
from tidewheel.engine.speculation.drafter import Draftable

LENGTH, ROUNDS = 100, 3
ENGINE_MS, DRAFT_MS, QUESTION_MS = 0.06, 0.004, 0.012

MACHINES: dict[str, Callable[[int], float]] = {  # milliseconds of a step, by its rows
    "small model": lambda rows: 0.15 + 0.012 * rows,
    "memory first": lambda rows: max(7.0 + rows, 1.5 * rows),
    "arithmetic alone": lambda rows: 1.5 * rows,
}


@dataclass
class World:
    """Sequences that decode together, in rounds.

    What draft tokens is right with `probability(how far a sequence is)`.
    """

    step_ms: Callable[[int], float]
    num_sequences: int
    probability: Callable[[int], float] | None
    question_ms: float = QUESTION_MS
    now_s: float = 0.0
    asked_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(5)
        self.coming: dict[int, list[int]] = {}
        self.driver = Driver(
            FakeExecutor(ExecutorLimits(16, 200, self.num_sequences, 1024)),
            1024,
            drafter=None if self.probability is None else self,
            clock=self.took_ms,
            seconds=lambda: self.now_s,
            is_fresh=True,
        )
        self.driver.cost_model.max_step_ms = 75.0

    def propose(self, sequence: Draftable) -> list[int]:
        assert self.probability is not None
        self.now_s += self.question_ms / 1e3
        start = sequence.num_tokens - sequence.prompt_len
        self.asked_at.append(start)
        sure = self.probability(start)
        coming = self.coming[sequence.key][start : start + 8]
        return [token if self.rng.random() < sure else (token + 1) % 256 for token in coming]

    def took_ms(self, step: Step) -> float:
        """How long the device took in a step, which is over then."""
        device_ms = self.step_ms(step.load.num_decodes) * self.rng.uniform(0.95, 1.05) + 0.5 * step.load.prefill_tokens
        self.now_s += (device_ms + ENGINE_MS + DRAFT_MS * len(step.rows.drafts)) / 1e3
        return device_ms

    def rounds(self) -> list[float]:
        """The seconds of each round."""
        times = []
        for _ in range(ROUNDS):
            for _ in range(self.num_sequences):
                job = Job((1, 2, 3, 4, len(self.driver.sampled)), SamplingParams(max_tokens=LENGTH))
                (key,) = self.driver.add(job)
                self.coming[key] = tokens_of(job.prompt[-1])
            started = self.now_s
            while (step := self.driver.step()) is not None:
                self.driver.scheduler.end_step(step)
            times.append(self.now_s - started)
        return times


def tokens_of(last: int) -> list[int]:
    """What is sampled behind a prompt that ends so."""
    if not TOKENS:
        driver = Driver(FakeExecutor(ExecutorLimits(16, 400, 64, 1024)), 1024)
        for i in range(16 * ROUNDS):
            driver.add(Job((1, 2, 3, 4, i), SamplingParams(max_tokens=LENGTH)))
        driver.run()
        TOKENS.update({key: driver.tokens(key) for key in driver.sampled})
    return TOKENS[last]


TOKENS: dict[int, list[int]] = {}


@cache
def plain_seconds(name: str, num_sequences: int) -> list[float]:
    """The seconds of each round without draft tokens."""
    return World(MACHINES[name], num_sequences, None).rounds()


ALWAYS = (("small model", 0.8, QUESTION_MS), ("arithmetic alone", 0.0, QUESTION_MS))


# Prices are found in some hundred steps of 16 sequences.
@pytest.mark.parametrize(
    ("name", "probability", "question_ms"),
    [
        pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.sweep)
        for case in itertools.product(MACHINES, (0.0, 0.5, 0.8), (QUESTION_MS, 10 * QUESTION_MS))
    ],
)
def test_draft_tokens_cost_a_busy_server_a_fiftieth_at_most(name: str, probability: float, question_ms: float) -> None:
    """Once it knows the machine, which is after the first round."""
    world = World(MACHINES[name], 16, lambda start: probability, question_ms)
    drafting = world.rounds()
    assert sum(drafting[1:]) <= 1.02 * sum(plain_seconds(name, 16)[1:])
    assert world.asked_at


def test_accepted_draft_tokens_save_time_where_rows_are_cheap() -> None:
    drafting = World(MACHINES["small model"], 4, lambda start: 0.95).rounds()
    assert sum(drafting) < 0.6 * sum(plain_seconds("small model", 4))


def test_draft_tokens_come_back_when_they_are_accepted_again() -> None:
    """The first third of each answer is new, and what follows repeats itself."""
    world = World(MACHINES["small model"], 1, lambda start: 0.0 if start < LENGTH // 3 else 1.0)
    world.rounds()
    stats = world.driver.scheduler.drafts
    assert stats is not None
    early = [start for start in world.asked_at if start < LENGTH // 3]
    assert len(early) < ROUNDS * LENGTH // 3 // 2, "questions that lose time are few"
    assert stats.stats.accepted_total > ROUNDS * LENGTH // 3, "half of what is repeated"


def test_pauses_grow_while_questions_lose_and_end_with_one_that_wins() -> None:
    budget = SpeculationBudget()
    asked = []
    for step in range(2000):
        budget.begin(1)
        if budget.may_call(0):
            asked.append(step)
            budget.note(0, -1.0, 1.0)
    gaps = [later - sooner for sooner, later in itertools.pairwise(asked)]
    assert gaps == sorted(gaps)
    assert 5 < len(asked) < 16
    while not budget.may_call(0):
        budget.begin(1)
    for _ in range(20):
        budget.note(0, 8.0, 1.0)
    assert all(budget.may_call(0) for _ in range(20))


def test_what_questions_give_beside_few_sequences_says_nothing_of_many() -> None:
    budget = SpeculationBudget()
    for count, saved_ms in ((32, -1.0), (2, 8.0)):
        budget.begin(count)
        assert budget.may_call(count)
        for _ in range(20):
            budget.note(count, saved_ms, 1.0)
    budget.begin(60)
    assert not budget.may_call(100)
    budget.begin(3)
    assert budget.may_call(101)


def test_new_sequences_wait_while_others_lose_and_one_that_ended_is_forgotten() -> None:
    budget = SpeculationBudget()
    assert budget.may_call(0)
    for _ in range(20):
        budget.note(0, -1.0, 1.0)
    assert not budget.may_call(1)
    assert budget.min_wait([0, 1]) > 0
    budget.ended(0)
    budget.note(0, 8.0, 1.0)  # nobody's
    assert not budget.may_call(2)
