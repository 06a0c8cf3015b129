"""Answers: the newest are found where they are, by their owner alone, in memory that does not grow."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.speculation.answers import SEPARATOR, Answers

SIZE = 64  # tokens, so the last 16 of an answer are kept
OWNERS = (3, 2**63 + 11)

answers = st.lists(
    st.tuples(st.sampled_from(OWNERS), st.lists(st.integers(0, 3), min_size=0, max_size=20)), max_size=12
)


def kept(said: list[tuple[int, list[int]]], most: int) -> list[tuple[int, list[int]]]:
    """The newest ones that there is room for. Each takes a place more than it has tokens, and one is in front."""
    newest: list[tuple[int, list[int]]] = []
    for owner, tokens in reversed([(owner, tokens[-SIZE // 4 :]) for owner, tokens in said if len(tokens) > 1]):
        if len(newest) == most or sum(len(other) + 1 for _, other in newest) + len(tokens) + 2 > SIZE:
            break
        newest.insert(0, (owner, tokens))
    return newest


@settings(max_examples=40, deadline=None)
@given(answers, st.integers(1, 8))
def test_two_tokens_are_found_wherever_their_owner_said_them(said: list[tuple[int, list[int]]], most: int) -> None:
    ring = Answers(most, SIZE)
    for owner, tokens in said:
        ring.add(owner, np.array(tokens, np.int32))
    expected = kept(said, most)
    assert len(ring) == len(expected)
    for owner in OWNERS:
        for before in range(4):
            for last in range(4):
                places = ring.places(owner, before, last)
                real = places[(ring.at(places) == last) & (ring.at(places - 1) == before)]
                pairs = [
                    tokens[i + 1 :]
                    for of, tokens in reversed(expected)
                    for i in reversed(range(1, len(tokens)))
                    if of == owner and tokens[i - 1 : i + 1] == [before, last]
                    for tokens in [tokens]
                ]
                assert [rest(ring, int(place)) for place in real] == pairs
                assert (np.diff(places) < 0).all()


def found(ring: Answers, owner: int) -> int:
    """How often 2 stands behind 1. Chains of other tokens may lead to other places, by accident."""
    places = ring.places(owner, 1, 2)
    return int(np.count_nonzero((ring.at(places) == 2) & (ring.at(places - 1) == 1)))


def rest(ring: Answers, place: int) -> list[int]:
    """What follows a place in its answer."""
    tokens = ring.at(np.arange(place + 1, place + SIZE)).tolist()
    return tokens[: tokens.index(SEPARATOR)]


def test_nothing_is_kept_where_none_may_be_and_after_all_is_forgotten() -> None:
    said = np.array([1, 2, 1, 2], np.int32)
    nothing, some = Answers(0, SIZE), Answers(4, SIZE)
    for ring in (nothing, some):
        ring.add(3, said)
    assert len(nothing) == 0
    assert found(some, 3) == 2
    some.clear()
    assert len(some) == found(some, 3) == 0
    some.add(3, said)
    assert found(some, 3) == 2


def test_the_last_places_count() -> None:
    ring = Answers(100, 2**12)
    for _ in range(90):
        ring.add(3, np.array([1, 2, 5], np.int32))
    assert len(ring.places(3, 1, 2)) == 64
    assert len(ring.places(4, 1, 2)) == 0
