"""Incremental detokenization: the joined pieces equal the text of decoding everything at once."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import tokenizers
from engine.tiny_tokenizers import KINDS, TEXT, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.text.detokenizer import Detokenizer
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.engine.text.tokenizer_backends import TokenizersBackend

kinds = pytest.mark.parametrize("kind", KINDS)


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@kinds
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer = tiny(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
    skip = data.draw(st.booleans())
    assert "".join(pieces(tokenizer.detokenizer((), skip), ids)) == tokenizer.decode(ids, skip)


@kinds
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_special_tokens_may_be_shown_one_by_one(kind: str, data: st.DataObject) -> None:
    tokenizer = tiny(kind)
    specials = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
    shown = data.draw(st.frozensets(st.sampled_from(specials)))
    ids = data.draw(st.lists(st.sampled_from(specials) | st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    visible = [i for i in ids if i in shown or not tokenizer.is_special(i)]
    text = tokenizer.decode(visible, skip_special_tokens=False)
    assert "".join(pieces(tokenizer.detokenizer((), True, shown), ids)) == text
    assert "".join(pieces(tokenizer.detokenizer((), False, shown), ids)) == tokenizer.decode(ids, False)


@kinds
@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=60) | st.sampled_from(TEXT))
def test_text_comes_back_without_replacement_characters_on_the_way(kind: str, text: str) -> None:
    tokenizer = tiny(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = pieces(tokenizer.detokenizer(), ids)
    assert "".join(parts) == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in part for part in parts)


@kinds
def test_output_continues_the_prompt_with_its_space(kind: str) -> None:
    tokenizer = tiny(kind)
    ids = tokenizer.encode("The tide turns the wheel")
    for length in range(2, len(ids)):
        prompt, output = ids[:length], ids[length:]
        text = "".join(pieces(tokenizer.detokenizer(prompt), output))
        assert tokenizer.decode(prompt) + text == "The tide turns the wheel"


@kinds
def test_a_character_of_several_tokens_comes_in_one_piece(kind: str) -> None:
    tokenizer = tiny(kind)
    ids = tokenizer.encode("a 🦩 b", add_special_tokens=False)
    parts = [part for part in pieces(tokenizer.detokenizer(), ids) if part]
    assert len(ids) > len(parts) or kind == "metaspace"
    assert "".join(parts) == tokenizer.decode(ids)


@kinds
def test_an_incomplete_character_at_the_end_is_replaced(kind: str) -> None:
    tokenizer = tiny(kind)
    ids = tokenizer.encode("ok 🦩", add_special_tokens=False)[:-1]
    assert "".join(pieces(tokenizer.detokenizer(), ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(("kind", "token"), [("byte-level", "ÿ"), ("byte-fallback", "<0xFF>")])
def test_nothing_is_held_back_for_ever(kind: str, token: str) -> None:
    tokenizer = tiny(kind)
    (invalid,) = (i for i in range(tokenizer.vocab_size) if tokenizer.id_to_token(i) == token)
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=False)
    started = time.perf_counter()
    shown = [detokenizer.push(invalid) for _ in range(5000)]
    assert time.perf_counter() - started < 60
    assert len([piece for piece in shown if piece]) > 10


@kinds
def test_the_price_of_a_token_does_not_depend_on_the_length_of_the_text(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in lines of Python and in tokens that the tokenizer decodes."""
    tokenizer = tiny(kind)
    ids = tokenizer.encode(" ".join(TEXT[:5]), add_special_tokens=False)
    decode, counted = tokenizer.backend.decode, 0

    def count_tokens(ids: list[int], *arguments: Any) -> str:
        nonlocal counted
        counted += len(ids)
        return decode(ids, *arguments)

    def count_lines(frame: Any, event: str, argument: Any) -> Any:
        nonlocal counted
        counted += event == "line"
        return count_lines

    monkeypatch.setattr(tokenizer.backend, "decode", count_tokens)
    detokenizer, before, costs = tokenizer.detokenizer(), sys.gettrace(), []
    for _ in range(16):
        counted = 0
        sys.settrace(count_lines)
        try:
            for token in ids:
                detokenizer.push(token)
        finally:
            sys.settrace(before)
        costs.append(counted)
    assert 0 < costs[-1] <= max(costs[:2])


def test_special_tokens_follow_each_other_with_or_without_a_space() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "<x>": 2, "<y>": 3}, "one"))
    words.add_special_tokens(["<x>", "<y>"])
    tokenizer = Tokenizer(TokenizersBackend(words))
    ids = [0, 2, 3, 1, 2, 3, 3, 0]

    def shown(spaces: bool) -> list[str]:
        return pieces(tokenizer.detokenizer((), skip_special_tokens=False, spaces_between_special_tokens=spaces), ids)

    assert "".join(shown(True)) == "one <x> <y> two <x> <y> <y> one"
    assert "".join(shown(False)) == "one <x><y> two <x><y><y> one"
    assert "".join(pieces(tokenizer.detokenizer((), True, (), False), ids)) == "one two one"


@kinds
@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=60) | st.sampled_from(TEXT))
def test_the_bytes_of_tokens_join_to_their_text(kind: str, text: str) -> None:
    tokenizer = tiny(kind)
    prompt = tokenizer.encode("a", add_special_tokens=False)  # behind a prompt no tokenizer drops a leading space
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = "".join(pieces(tokenizer.detokenizer(prompt, False), ids))
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert joined.decode(errors="replace") == shown  # the library itself cannot spell every added token


@kinds
@settings(max_examples=70, deadline=None)
@given(data=st.data())
def test_the_bytes_of_any_tokens_are_their_text_as_far_as_it_is_any(kind: str, data: st.DataObject) -> None:
    tokenizer = tiny(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    prompt = tokenizer.encode("a", add_special_tokens=False)
    shown = "".join(pieces(tokenizer.detokenizer(prompt, False), ids))
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
    if "\ufffd" not in joined:
        assert joined == shown
