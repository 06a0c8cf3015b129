"""The load tests count what a stream holds, however the network cuts it."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure import StreamError, StreamTimer, percentile, summarize, table
from sse import EventParser

STREAM = b'data: {"a": 1}\r\n\r\n: a comment\n\nevent: note\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
EVENTS = ['{"a": 1}', "one\ntwo", "[DONE]"]


def frame(event: object) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_where_the_bytes_were_cut(cuts: list[int]) -> None:
    parser = EventParser()
    edges = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[start:end] for start, end in itertools.pairwise(edges)]
    assert [event for chunk in chunks for event in parser.feed(chunk)] == EVENTS


def test_only_chunks_with_content_are_timed_and_usage_counts_the_tokens() -> None:
    timer = StreamTimer(started=10.0)
    assert timer.feed(frame({"choices": [{"delta": {"role": "assistant", "content": ""}}]}), 10.1) == 0
    assert timer.feed(frame({"choices": [{"delta": {"content": "Hi "}}]}), 10.5) == 1
    assert timer.feed(frame({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}), 10.75) == 1
    assert timer.feed(frame({"choices": [{"delta": {}, "finish_reason": "stop"}]}), 10.8) == 0
    timer.feed(frame({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}), 10.9)
    timer.feed(b"data: [DONE]\n\n", 11.0)
    timer.finish()
    assert timer.ttft_ms == pytest.approx(500)
    assert timer.itl_ms == pytest.approx([250])
    assert timer.prompt_tokens == 7
    assert timer.tokens == 3
    assert timer.tokens_per_second == pytest.approx(4)


def test_without_usage_the_pieces_of_text_are_the_tokens() -> None:
    timer = StreamTimer(started=0.0)
    timer.feed(frame({"choices": [{"text": "a"}]}) + frame({"choices": [{"text": "b"}]}), 1.0)
    assert timer.tokens == 2
    assert timer.itl_ms == [0.0]


def test_an_error_in_the_stream_is_raised() -> None:
    with pytest.raises(StreamError, match="out of memory"):
        StreamTimer(started=0.0).feed(frame({"error": {"message": "out of memory"}}), 1.0)


@pytest.mark.parametrize(
    ("stream", "message"),
    [(frame({"choices": [{"text": "a"}]}), "without"), (b"data: [DONE]\n\n", "no text")],
)
def test_an_answer_that_is_not_whole_is_an_error(stream: bytes, message: str) -> None:
    timer = StreamTimer(started=0.0)
    timer.feed(stream, 1.0)
    with pytest.raises(StreamError, match=message):
        timer.finish()


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, p) for p in (0, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([3.0, 1.0], 50) == 1
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_table_has_a_row_for_every_summary_even_an_empty_one() -> None:
    lines = table({"some": summarize([1.0, 2.0]), "none": summarize([])}).splitlines()
    assert lines[1].split() == ["some", "2", "1.5", "1", "2", "2", "2"]
    assert lines[2].split() == ["none", "0", *"-----"]
