"""The time in which anything is decoded, by a clock that is set. The speed in the page's panel is computed from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from server.scripted_engine import ScriptedEngine

from tidewheel.engine.outputs import FinishReason, RequestOutput
from tidewheel.server.telemetry import metrics as telemetry
from tidewheel.server.telemetry.metrics import RequestTimer, ServerMetrics


class Streams:
    """Requests whose tokens come at times that are set, in milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(telemetry, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        self.metrics = ServerMetrics(ScriptedEngine(), "m", "x:")
        self.timers: dict[str, RequestTimer] = {}

    def play(self, *tokens: tuple[int, str, str]) -> None:
        """Each is a time, a request and what it gets: a token for each character; `.` ends the request."""
        for at_ms, name, text in tokens:
            self.now_s = at_ms / 1000
            timer = self.timers.setdefault(name, self.metrics.start_timer())
            choice: Any = SimpleNamespace(times=None, index=0)
            ends = FinishReason.STOP if text.endswith(".") else None
            timer.on_output(RequestOutput(0, text, tuple(range(len(text))), finish_reason=ends), choice)

    @property
    def tokens(self) -> int:
        """The tokens behind first ones."""
        return int(self.metrics.inter_token_latency.buckets()[-1][1])

    @property
    def decode_ms(self) -> int:
        return round(1000 * self.metrics.decode_clock.seconds)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_one_stream_takes_from_its_first_token_to_its_last(streams: Streams) -> None:
    streams.play((900, "a", "x"), (930, "a", "x"), (1000, "a", "xx"), (1100, "a", "x."))
    assert (streams.tokens, streams.decode_ms) == (5, 200)
    streams.play((5000, "b", "x"), (5040, "b", "."))  # after a rest, which is not counted, nor is its prompt's time
    assert (streams.tokens, streams.decode_ms) == (6, 240)


def test_the_time_of_several_streams_is_counted_once(streams: Streams) -> None:
    streams.play((100, "a", "x"), (150, "b", "x"), (200, "a", "x"), (200, "b", "x"), (250, "a", "."), (300, "b", "."))
    assert (streams.tokens, streams.decode_ms) == (4, 200)


def test_a_stream_that_waits_for_its_next_token_goes_on_decoding(streams: Streams) -> None:
    streams.play((100, "a", "x"), (200, "b", "x"), (250, "b", "."), (700, "a", "."))
    assert (streams.tokens, streams.decode_ms) == (2, 600)


def test_a_stream_that_nobody_hears_the_end_of_counts_no_longer(streams: Streams) -> None:
    streams.play((100, "a", "x"), (150, "a", "x"))
    streams.timers["a"].stop([], telemetry.SamplingParams(), [])
    streams.play((900, "b", "x"), (950, "b", "."))
    assert (streams.tokens, streams.decode_ms) == (2, 100)
