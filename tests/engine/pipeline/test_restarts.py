"""How often a pipeline starts again, and after which pauses."""

from __future__ import annotations

from tidewheel.engine.pipeline.restarts import Restarts


def test_pauses_grow_until_there_have_been_too_many() -> None:
    restarts = Restarts(lambda: 5.0)
    assert [restarts.pause_s() for _ in range(7)] == [0.0, 1.0, 2.0, 4.0, 8.0, None, None]
    assert restarts.total == 5


def test_what_was_long_ago_does_not_count() -> None:
    now = [0.0]
    restarts = Restarts(lambda: now[0])
    for _ in range(5):
        restarts.pause_s()
    now[0] = 601.0
    assert [restarts.pause_s() for _ in range(2)] == [0.0, 1.0]
    assert restarts.total == 7
