"""Pieces of a tower's work get the size that takes a few milliseconds."""

from __future__ import annotations

import pytest

from tidewheel.engine.devices.cpu import pace
from tidewheel.engine.devices.cpu.pace import Pace


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace, "perf_counter", clock)
    return clock


def sizes(own: Pace, clock: Clock, seconds_per_row: float, pieces: int) -> list[int]:
    """How many rows each of so many pieces of five milliseconds has."""
    found = []
    for _ in range(pieces):
        found.append(own.rows(0.005))
        with own.piece(found[-1]):
            clock.now += found[-1] * seconds_per_row
    return found


def test_the_estimate_follows_the_work_the_threads_and_the_time() -> None:
    assert Pace(1024, 10**6, 1).rows(0.005) == 100
    assert Pace(1024, 10**6, 1).rows(0.02) == 400
    assert Pace(1024, 10**6, 8).rows(0.005) == 800
    assert Pace(1024, 10**9, 1).rows(0.005) == 32
    assert Pace(1024, 0, 1).rows(0.005) == 1024
    assert Pace(16, 10**9, 1).rows(0.005) == 16
    assert Pace(1024, 10**6, 1).rows(0) == 32


def test_pieces_come_to_take_as_long_as_they_should(clock: Clock) -> None:
    assert sizes(Pace(1024, 10**6, 1), clock, 0.005 / 320, 4) == [100, 200, 320, 320]
    slower = sizes(Pace(1024, 10**6, 1), clock, 0.005 / 50, 12)
    assert slower[:3] == [100, 91, 83]
    assert slower[-2:] == [50, 50]


def test_pieces_have_at_least_32_rows_and_at_most_what_there_is_room_for(clock: Clock) -> None:
    assert sizes(Pace(1024, 10**6, 1), clock, 1.0, 20)[-2:] == [32, 32]
    assert sizes(Pace(256, 10**6, 1), clock, 0.0, 4) == [100, 200, 256, 256]


def test_pieces_that_were_held_up_hardly_change_the_next_ones(clock: Clock) -> None:
    own = Pace(1024, 10**6, 1)
    for took in (60, 0.005, 60, 60, 0.005):
        with own.piece(100):
            clock.now += took
    assert own.rows(0.005) == 100


def test_pieces_of_the_same_rows_have_about_the_same_size() -> None:
    own = Pace(1024, 10**6, 1)
    assert [own.next_piece(left, 0.005) for left in (1, 100, 101, 50, 240, 160)] == [1, 100, 51, 50, 80, 80]
