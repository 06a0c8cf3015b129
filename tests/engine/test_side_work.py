"""SideWorkTurns: side work shares the time between two steps."""

from __future__ import annotations

import time

import pytest

from tidewheel.engine.side_work import SideWork, SideWorkTurns

STEP_MS = 80.0


class Clock:
    """Time that passes only while something is computed."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Fake(SideWork):
    """Has so many pieces to compute, each of which takes `cost` times as long as it should."""

    def __init__(self, clock: Clock, pieces: int, cost: float = 1.0) -> None:
        self.clock, self.pieces, self.cost = clock, pieces, cost
        self.lengths_s: list[float] = []
        self.is_blocked = False
        self.closed_with: list[BaseException | None] = []

    @property
    def is_waiting(self) -> bool:
        return self.pieces > 0

    @property
    def used_s(self) -> float:
        return sum(self.lengths_s)

    def run_piece(self, piece_s: float, *, nothing_runs: bool) -> bool:
        if self.is_blocked and not nothing_runs:
            return False
        self.pieces -= 1
        self.clock.now_s += piece_s * self.cost
        self.lengths_s.append(piece_s * self.cost)
        return True

    def close(self, failure: BaseException | None = None) -> None:
        self.closed_with.append(failure)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def turns_of(*work: Fake) -> SideWorkTurns:
    turns = SideWorkTurns(STEP_MS)
    for one in work:
        turns.add(one)
    return turns


def test_a_quarter_of_a_step_is_for_side_work_while_sequences_run(clock: Clock) -> None:
    work = Fake(clock, 100)
    turns = turns_of(work)
    for _ in range(5):
        spent_s = turns.run(nothing_runs=False)
        assert 0.25 * STEP_MS <= spent_s * 1e3 <= 0.25 * STEP_MS + 6
    assert max(work.lengths_s) <= 0.006


def test_one_longer_piece_is_run_at_a_time_while_nothing_runs(clock: Clock) -> None:
    work = Fake(clock, 3)
    turns = turns_of(work)
    for left in (2, 1, 0):
        assert turns.is_waiting
        assert 0.01 <= turns.run(nothing_runs=True) <= 0.05
        assert work.pieces == left
    assert not turns.is_waiting
    assert turns.run(nothing_runs=True) == 0


def test_two_kinds_get_the_same_time_whatever_a_piece_takes(clock: Clock) -> None:
    short, long = Fake(clock, 10_000), Fake(clock, 10_000, cost=3)
    turns = turns_of(short, long)
    for _ in range(50):
        turns.run(nothing_runs=False)
    assert short.used_s == pytest.approx(long.used_s, abs=0.02)


def test_who_comes_later_does_not_make_up_for_the_time_without_work(clock: Clock) -> None:
    early, late = Fake(clock, 10_000), Fake(clock, 0)
    turns = turns_of(early, late)
    for _ in range(50):
        turns.run(nothing_runs=False)
    before, late.pieces = early.used_s, 10_000
    for _ in range(50):
        turns.run(nothing_runs=False)
    assert early.used_s - before == pytest.approx(late.used_s, abs=0.02)


def test_what_must_wait_holds_nobody_up(clock: Clock) -> None:
    blocked, other = Fake(clock, 100), Fake(clock, 100)
    blocked.is_blocked = True
    turns = turns_of(blocked, other)
    assert turns.run(nothing_runs=False) > 0
    assert (blocked.pieces, other.pieces < 100) == (100, True)
    other.pieces = 0
    assert turns.run(nothing_runs=False) == 0
    assert turns.run(nothing_runs=True) > 0
    assert blocked.pieces == 99


def test_all_are_closed_once_with_what_has_failed(clock: Clock) -> None:
    work, failure = [Fake(clock, 1), Fake(clock, 1)], RuntimeError()
    turns = turns_of(*work)
    turns.close(failure)
    turns.close()
    assert [one.closed_with for one in work] == [[failure], [failure]]
