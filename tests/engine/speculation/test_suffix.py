"""Draft tokens from what mostly followed the same last tokens, in the sequence and in earlier answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.adapters.lora import Lora
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.sequences.sequence import Sequence
from tidewheel.engine.speculation.suffix import SuffixDrafter
from tidewheel.engine.speculation.suffix_options import SuffixOptions


def sequence(
    tokens: list[int], answer: tuple[int, ...] = (), salt: str | None = None, lora: Lora | None = None
) -> Sequence:
    new = Sequence(0, np.array(tokens, np.int32), SamplingParams(), seed=0, max_length=1000, cache_salt=salt, lora=lora)
    for token in answer:
        new.append(token)
    return new


def drafter(num_tokens: int = 8, max_context: int | None = None, **options: float) -> SuffixDrafter:
    return SuffixDrafter(num_tokens, SuffixOptions(**options), max_context)  # type: ignore[arg-type]


QUOTED = [5, 6, 7, 8, 9, 1, 2, 5, 6, 7]


def test_a_longer_run_is_followed_further() -> None:
    assert drafter().propose(sequence(QUOTED)) == [8, 9, 1]
    assert drafter(2).propose(sequence(QUOTED)) == [8, 9]
    assert drafter(max_spec_factor=2.0).propose(sequence(QUOTED)) == [8, 9, 1, 2, 5, 6]
    assert drafter(max_tree_depth=4).propose(sequence(QUOTED)) == [8, 9]
    assert drafter(max_spec_factor=0.1).propose(sequence(QUOTED)) == []
    assert drafter().propose(sequence([*QUOTED, 3])) == []
    assert drafter(max_context=9).propose(sequence(QUOTED)) == []
    assert drafter().propose(sequence([4])) == []


def test_what_came_most_often_is_drafted_and_the_newest_of_equals() -> None:
    often = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 8, 1, 2]
    assert drafter().propose(sequence(often)) == [3, 8]
    assert drafter(min_token_prob=0.5).propose(sequence(often)) == [3], "8 came once in three times"
    assert drafter(min_token_prob=0.7).propose(sequence(often)) == []


def test_earlier_answers_count_and_prompts_do_not() -> None:
    drafting = drafter()
    drafting.ended(sequence([40, 41, 42, 43], (10, 11, 12, 13, 14)))
    assert drafting.propose(sequence([70, 10, 11])) == [12, 13]
    assert drafting.propose(sequence([70, 41, 42])) == []
    assert drafting.propose(sequence([10, 11, 12, 13])) == [14]
    drafting.forget()
    assert drafting.propose(sequence([70, 10, 11])) == []
    silent = drafter(max_cached_requests=0)
    silent.ended(sequence([40], (10, 11, 12, 13)))
    assert silent.propose(sequence([70, 10, 11])) == []


def test_only_so_many_answers_are_kept() -> None:
    drafting = drafter(max_cached_requests=2)
    for first in (10, 20, 30):
        drafting.ended(sequence([1], (first, first + 1, first + 2)))
    assert drafting.propose(sequence([70, 10, 11])) == []
    assert drafting.propose(sequence([70, 20, 21])) == [22]
    assert drafting.propose(sequence([70, 30, 31])) == [32]


@pytest.mark.parametrize(
    "stranger",
    [{"salt": "b"}, {}, {"salt": "a", "lora": Lora(0, "x")}, {"lora": Lora(1, "y")}],
    ids=str,
)
def test_no_answer_is_used_for_another_salt_or_adapter(stranger: dict[str, object]) -> None:
    drafting = drafter()
    answer = (10, 11, 12, 13, 14)
    drafting.ended(sequence([1], answer, salt="a"))
    drafting.ended(sequence([1], answer, lora=Lora(1, "z")))
    assert drafting.propose(sequence([70, 10, 11], (), **stranger)) == []  # type: ignore[arg-type]
    assert drafting.propose(sequence([70, 10, 11], salt="a")) == [12, 13]
    assert drafting.propose(sequence([70, 10, 11], lora=Lora(5, "z"))) == [12, 13], "its number may change"


# The oracle searches all texts for all runs, in each example.
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=6), st.integers(2, 12))
def test_draft_tokens_have_followed_somewhere_and_keep_to_the_limit(texts: list[list[int]], depth: int) -> None:
    drafting = drafter(64, max_tree_depth=depth, min_token_prob=0.0)
    *earlier, own = texts
    for text in earlier:
        drafting.ended(sequence([9], tuple(text)))
    draft_tokens = drafting.propose(sequence(own))
    if draft_tokens:
        sources = [*earlier, own]
        runs = [own[-length:] for length in range(1, depth) if length <= len(own)]
        longest = max(len(run) for run in runs for text in sources if contains(text, [*run, draft_tokens[0]]))
        assert len(draft_tokens) <= min(longest, depth - 1)
        assert any(contains(text, [own[-1], *draft_tokens]) for text in sources)


def contains(text: list[int], run: list[int]) -> bool:
    return any(text[i : i + len(run)] == run for i in range(len(text)))
