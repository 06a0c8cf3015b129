"""Long texts are encoded no further than their tokens can be used, and those are the tokens of the whole text."""

from __future__ import annotations

import functools
import random

import pytest
import tokenizers
from engine.tiny_tokenizers import KINDS, SPECIAL, TEXT
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.text.long_texts import MARGIN, SHORT_TEXT, encode_at_most, encode_part, max_characters
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.engine.text.tokenizer_backends import TokenizersBackend
from tidewheel.server.options.model import DEMO_MODEL

WORDS = [*SPECIAL, "<|late|>", "plainly added", "\n\n", "  ", "é", "12345", *" ".join(TEXT[:5]).split(" ")]


@functools.cache
def library(kind: str) -> tokenizers.Tokenizer:
    return KINDS[kind]()


@functools.cache
def ours(kind: str) -> Tokenizer:
    return Tokenizer.load(DEMO_MODEL) if kind == "demo" else Tokenizer(TokenizersBackend(library(kind)))


class Counted:
    """An encoder with one token for `width` characters, which counts what it was given."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.characters = 0

    def __call__(self, text: str) -> list[int]:
        self.characters += len(text)
        return [ord(text[i]) for i in range(0, len(text), self.width)]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=20)
@given(text=st.text(max_size=50) | st.lists(st.sampled_from(WORDS), max_size=20).map("".join), long=st.booleans())
def test_encoding_lets_other_threads_run_and_gives_the_same(kind: str, text: str, long: bool) -> None:
    for special in (True, False):
        assert (
            ours(kind).encode(text, add_special_tokens=special)
            == library(kind).encode(text, add_special_tokens=special).ids
        )


@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens_are_decoded_as_few_are(kind: str) -> None:
    ids = random.Random(0).choices(range(ours(kind).vocab_size), k=2000)
    for skip in (True, False):
        assert ours(kind).decode(ids, skip) == library(kind).decode(ids, skip_special_tokens=skip)


@given(
    width=st.integers(1, 64),
    length=st.integers(0, 2**21),
    num_tokens=st.integers(1, 2**17),
)
@settings(deadline=None, max_examples=20)
def test_a_text_is_whole_or_too_long(width: int, length: int, num_tokens: int) -> None:
    encode, text = Counted(width), "a" * length
    tokens = encode_at_most(encode, text, num_tokens)
    if tokens is None:
        assert length > max_characters(num_tokens) or -(-length // width) > num_tokens
    else:
        assert len(tokens) == -(-length // width)
    # The last piece has at most twice as many tokens as are wanted, and those before it have half as many each.
    max_tokens = max(2 * (num_tokens + MARGIN), SHORT_TEXT)
    assert encode.characters <= 2 * width * max_tokens


@pytest.mark.parametrize("length", [30_000_000, SHORT_TEXT + 1])
def test_a_far_too_long_text_is_not_encoded(length: int) -> None:
    encode = Counted(100_000)  # as a tokenizer that makes one token of any number of spaces
    assert encode_at_most(encode, " " * length, 512) is None
    assert encode.characters == 0
    assert len(encode_part(encode, " " * length, 5, end=True)) == 3
    assert encode.characters <= 2 * SHORT_TEXT


@pytest.mark.parametrize("kind", ["demo", *KINDS])
@settings(deadline=None, max_examples=3)
@given(seed=st.integers(), length=st.integers(70_000, 200_000), num_tokens=st.integers(1, 3000), end=st.booleans())
def test_a_cut_text_has_the_tokens_of_the_whole(kind: str, seed: int, length: int, num_tokens: int, end: bool) -> None:
    text = " ".join(random.Random(seed).choices(WORDS, k=length // 4))[:length]
    encode = ours(kind).encode
    whole, part = encode(text), encode_part(encode, text, num_tokens, end=end)
    if num_tokens + MARGIN < len(text) // 20:
        assert len(part) < len(whole)
    assert len(part) >= num_tokens
    if end:
        assert part[-num_tokens:] == whole[-num_tokens:]
    else:
        assert part[:num_tokens] == whole[:num_tokens]
