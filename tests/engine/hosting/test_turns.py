"""Turns: threads have the cores one at a time, and each as long as the others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tidewheel.engine.hosting.turns import Turn, Turns


class Clock:
    """Time that passes only when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Worker:
    """A thread whose steps take so long, one after the other. It begins at a time, and ends with its steps."""

    def __init__(self, clock: Clock, turns: Turns, steps_s: Sequence[float]) -> None:
        self.clock, self.steps_s = clock, steps_s
        self.turn = turns.join()
        self.ran: list[tuple[float, float, int]] = []  # of each step: its begin, its end, and how many others waited
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for step_s in self.steps_s:
            num_others = self.turn.take()
            began = self.clock.now_s
            self.clock.now_s += step_s
            self.ran.append((began, self.clock.now_s, num_others))
        self.turn.give_back()

    def used_s(self, until: float) -> float:
        return sum(end - begin for begin, end, _ in self.ran if end <= until)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def turns(clock: Clock) -> Turns:
    return Turns(clock)


def run(turns: Turns, *workers: Worker, gate: Turn | None = None) -> None:
    """Let all of them begin at the same time, and end."""
    gate = gate or turns.join()
    gate.take()
    for number, worker in enumerate(workers, 1):
        worker.thread.start()
        while turns.num_waiting < number:
            pass
    gate.give_back()
    for worker in workers:
        worker.thread.join(60)
        assert not worker.thread.is_alive()


def test_each_has_the_same_time_whatever_a_step_takes(clock: Clock, turns: Turns) -> None:
    short, long = Worker(clock, turns, [0.01] * 900), Worker(clock, turns, [0.03] * 300)
    run(turns, short, long)
    for until in (1.0, 5.0, 10.0):
        assert short.used_s(until) == pytest.approx(long.used_s(until), abs=0.04)
    steps = sorted(short.ran + long.ran)
    assert all(before[1] <= after[0] for before, after in pairwise(steps)), "one at a time"


def test_it_says_how_many_others_wait(clock: Clock, turns: Turns) -> None:
    workers = [Worker(clock, turns, [0.02] * count) for count in (50, 50, 10)]
    run(turns, *workers)
    for worker in workers[:2]:
        assert [num_others for _, _, num_others in worker.ran[1:8]] == [2] * 7
        assert [num_others for _, _, num_others in worker.ran[12:48]] == [1] * 36
    late = Worker(clock, turns, [0.02])
    run(turns, late)
    assert [num_others for _, _, num_others in late.ran] == [0]


def test_who_had_nothing_to_do_does_not_make_up_for_it(clock: Clock, turns: Turns) -> None:
    idle = turns.join()
    idle.take()
    idle.give_back()
    early = Worker(clock, turns, [0.02] * 100)
    run(turns, early)
    late = Worker(clock, turns, [0.02] * 100)
    again = Worker(clock, turns, [0.02] * 100)
    again.turn = early.turn
    start = clock.now_s
    run(turns, late, again, gate=idle)
    assert late.used_s(start + 1.0) == pytest.approx(again.used_s(start + 1.0), abs=0.03)


def test_one_long_step_is_not_made_up_for_at_once(clock: Clock, turns: Turns) -> None:
    long, other = Worker(clock, turns, [5.0] + [0.01] * 50), Worker(clock, turns, [0.01] * 100)
    run(turns, long, other)
    gaps_s = [after[0] - before[1] for before, after in pairwise(long.ran)]
    assert max(gaps_s) <= 0.07


def test_cores_that_were_given_back_are_free(clock: Clock, turns: Turns) -> None:
    one, other = turns.join(), turns.join()
    assert one.take() == 0
    one.give_back()
    one.give_back()
    assert other.take() == 0
    one.give_back()  # which has nothing to give back
    thread = threading.Thread(target=one.take)
    thread.start()
    while not turns.num_waiting:
        pass
    assert thread.is_alive()
    other.give_back()
    thread.join(60)
    assert not thread.is_alive()
