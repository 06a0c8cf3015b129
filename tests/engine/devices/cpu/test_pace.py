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
    """How many rows each of so many pieces has."""
    found = []
    for _ in range(pieces):
        found.append(own.rows)
        with own.piece(own.rows):
            clock.now += own.rows * seconds_per_row
    return found


def test_the_estimate_follows_the_work_and_the_threads() -> None:
    assert Pace(1024, 10**6, 1).rows == 100
    assert Pace(1024, 10**6, 8).rows == 800
    assert Pace(1024, 10**9, 1).rows == 32
    assert Pace(1024, 0, 1).rows == 1024
    assert Pace(16, 10**9, 1).rows == 16


def test_pieces_come_to_take_five_milliseconds(clock: Clock) -> None:
    assert sizes(Pace(1024, 10**6, 1), clock, 0.005 / 320, 4) == [100, 200, 320, 320]
    assert sizes(Pace(1024, 0, 1), clock, 0.005 / 320, 4) == [1024, 512, 320, 320]


def test_pieces_have_at_least_32_rows_and_at_most_what_there_is_room_for(clock: Clock) -> None:
    assert sizes(Pace(1024, 10**6, 1), clock, 1.0, 4) == [100, 50, 32, 32]
    assert sizes(Pace(256, 10**6, 1), clock, 0.0, 4) == [100, 200, 256, 256]


def test_a_piece_that_was_held_up_halves_the_next_one(clock: Clock) -> None:
    own = Pace(1024, 10**6, 1)
    with own.piece(100):
        clock.now += 60
    assert own.rows == 50


def test_pieces_of_the_same_rows_have_about_the_same_size() -> None:
    own = Pace(1024, 10**6, 1)
    assert [own.next_piece(left) for left in (1, 100, 101, 50, 240, 160)] == [1, 100, 51, 50, 80, 80]
