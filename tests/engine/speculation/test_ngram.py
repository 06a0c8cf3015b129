"""Draft tokens from runs of tokens that were seen before."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.sequences.sequence import Sequence
from tidewheel.engine.speculation.ngram import NgramDrafter

LENGTHS = st.integers(1, 5)


def proposed(
    tokens: list[int], num_tokens: int, longest: int, shortest: int, max_context: int | None = None
) -> list[int]:
    sequence = Sequence(0, np.array(tokens, np.int32), SamplingParams(), seed=0, max_length=1000)
    return NgramDrafter(num_tokens, longest, shortest, max_context).propose(sequence)


def expected(tokens: list[int], num_tokens: int, longest: int, shortest: int) -> list[int]:
    """Place by place, as the class says it."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        run = tokens[-length:]
        follow = [i + length for i in range(len(tokens) - length) if tokens[i : i + length] == run]
        if follow:
            enough = [at for at in follow if at + num_tokens <= len(tokens)]
            at = enough[-1] if enough else follow[0]
            return tokens[at : at + num_tokens]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), LENGTHS, LENGTHS, LENGTHS)
def test_the_longest_run_that_was_seen_goes_on_as_it_did(tokens: list[int], count: int, some: int, more: int) -> None:
    shortest, longest = sorted((some, more))
    assert proposed(tokens, count, longest, shortest) == expected(tokens, count, longest, shortest)


def test_examples() -> None:
    quoted = [5, 6, 7, 8, 9, 1, 2, 5, 6]
    assert proposed(quoted, 3, 4, 1) == [7, 8, 9]
    assert proposed(quoted, 3, 4, 3) == []
    assert proposed([1, 2, 1, 3, 1], 2, 4, 1) == [3, 1], "the last place counts"
    assert proposed([7, 7, 7, 7], 2, 2, 1) == [7, 7]
    assert proposed([4], 2, 2, 1) == []
    assert proposed(quoted, 3, 4, 1, max_context=8) == []
    assert proposed(quoted, 3, 4, 1, max_context=9) == [7, 8, 9]
