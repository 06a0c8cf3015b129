"""Filters forbid what they promise, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from engine.constraints.grammars import VOCAB_SIZE, allowed
from engine.tiny_tokenizers import tiny
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.constraints.filters import ALL, AllowedTokens, BadWords, TokenFilter, bad_word_tokens, mask_words

WORDS = mask_words(VOCAB_SIZE)
EVERY = set(range(VOCAB_SIZE))
tokens = st.integers(0, 3) | st.sampled_from([31, 32, 402])  # few, so that runs come up


def restricted(token_filter: TokenFilter) -> set[int]:
    mask = np.full(WORDS, ALL, np.uint32)
    token_filter.restrict(mask)
    return allowed(mask)


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=9))
def test_allowed_tokens(ids: list[int]) -> None:
    assert restricted(AllowedTokens(ids, WORDS)) == set(ids)


@given(st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=5), st.lists(tokens, max_size=12))
def test_no_bad_word_is_ever_completed_and_nothing_else_forbidden(words: list[list[int]], text: list[int]) -> None:
    bad_words = BadWords([tuple(word) for word in words], WORDS)
    for i in range(len(text) + 1):
        before = text[:i]
        forbidden = {word[-1] for word in words if before[len(before) - len(word) + 1 :] == word[:-1]}
        assert restricted(bad_words) == EVERY - forbidden
        if i < len(text):
            bad_words.advance(text[i])


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "metaspace"])
def test_bad_words_are_found_at_the_start_and_after_a_space(kind: str) -> None:
    tokenizer = tiny(kind)
    runs = bad_word_tokens(tokenizer, ["wheel", " wheel", "wheel", " "])
    assert len(set(runs)) == len(runs)
    for text in ("wheel", " wheel", " "):
        assert tuple(tokenizer.encode(text, add_special_tokens=False)) in runs
