"""Where media stand in a prompt, the positions of its tokens, and how steps may cut it."""

from __future__ import annotations

import numpy as np
import pytest
from engine.media.stripes import WIDTH, StripesVision, picture
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.media.media import MediaSpan
from tidewheel.engine.media.prompt_media import PromptMedia


def prompt(*, two_way: bool = False, axes: bool = False) -> PromptMedia:
    """Two tokens, an image of six in two spans, a token, the same image again, three tokens."""
    media = picture(6)
    spans = [MediaSpan(media, 2, 4), MediaSpan(media, 7, 2, first_row=4), MediaSpan(media, 10, 6)]
    made = PromptMedia(spans, np.zeros(19, np.int32), StripesVision(two_way=two_way, axes=axes))
    made.embeddings[media.digest] = np.arange(6 * WIDTH, dtype=np.float32).reshape(6, WIDTH)
    return made


def test_a_medium_is_named_once_however_often_it_is_there() -> None:
    assert len([*prompt().media]) == 1


def test_rows_are_those_of_the_tokens_asked_for() -> None:
    found = [*prompt().within(3, 8)]
    assert [place for place, _ in found] == [slice(0, 3), slice(4, 5)]
    assert [rows[:, 0].tolist() for _, rows in found] == [[WIDTH, 2 * WIDTH, 3 * WIDTH], [4 * WIDTH]]


@given(start=st.integers(0, 18), length=st.integers(1, 19))
def test_rows_of_parts_are_those_of_the_whole(start: int, length: int) -> None:
    media, end = prompt(), min(start + length, 19)
    whole = np.full((19, WIDTH), -1.0, np.float32)
    for place, rows in media.within(0, 19):
        whole[place] = rows
    part = np.full((end - start, WIDTH), -1.0, np.float32)
    for place, rows in media.within(start, end):
        part[place] = rows
    np.testing.assert_array_equal(part, whole[start:end])


def test_identity_tells_spans_of_one_medium_apart() -> None:
    positions, names = zip(*prompt().identity, strict=True)
    assert positions == (2, 7, 10)
    assert len({*names}) == 3


def test_without_two_way_a_step_may_end_anywhere() -> None:
    assert prompt().uncut(0, 4, 4) == 4


@pytest.mark.parametrize(
    ("start", "tokens", "room", "taken"),
    [
        (0, 4, 19, 2),  # up to the image
        (2, 2, 3, 0),  # no room for it
        (2, 2, 4, 4),  # more than was asked for
        (4, 1, 2, 2),  # begun within it, after a cached prefix
        (0, 6, 6, 6),
        (6, 9, 9, 4),  # behind a whole span, before the next
        (16, 3, 3, 3),
    ],
)
def test_with_two_way_no_step_ends_within_a_span(start: int, tokens: int, room: int, taken: int) -> None:
    assert prompt(two_way=True).uncut(start, tokens, room) == taken


def test_tokens_of_a_span_see_all_of_it() -> None:
    assert prompt(two_way=True).visible_until(1, 12).tolist() == [2, 6, 6, 6, 6, 7, 9, 9, 10, 16, 16]


def test_positions_count_on_behind_the_largest_of_an_image() -> None:
    media = picture(6)  # 2 rows of 3
    made = PromptMedia([MediaSpan(media, 2, 6)], np.zeros(10, np.int32), StripesVision(axes=True))
    assert made.rope is not None
    assert made.rope.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert made.delta == -3
    assert made.rope_positions(8, 13).tolist() == [[5, 6, 7, 8, 9]] * 3
    assert made.rope_positions(11, 13).tolist() == [[8, 9]] * 3
