"""Texts and pairs become the same tokens as in transformers, and are cut in the same way."""

from __future__ import annotations

from pathlib import Path

import encoder_zoo as zoo
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.encoders.tokenization import EncoderTokenizer
from tidewheel.engine.errors import InvalidRequestError

KINDS = ["bert", "roberta-cls"]
TEXT = st.text(max_size=30) | st.lists(st.sampled_from([*zoo.WORDS, "[SEP]", "</s>"]), max_size=12).map(" ".join)


def load(kind: str) -> EncoderTokenizer:
    return EncoderTokenizer.load(zoo.folder(kind))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(first=TEXT, second=st.none() | TEXT, limit=st.none() | st.integers(5, 30))
def test_as_transformers_does(kind: str, first: str, second: str | None, limit: int | None) -> None:
    texts = [[text] for text in (first, second) if text is not None]
    theirs = zoo.tokenizer(kind)(
        *texts, return_token_type_ids=True, max_length=limit, truncation="longest_first" if limit else False
    )
    ours = load(kind).encode(first, second, truncate_to=limit)
    assert list(ours.token_ids) == theirs["input_ids"][0]
    if kind == "bert":  # the other has no type ids
        assert list(ours.type_ids or ()) == theirs["token_type_ids"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_without_special_tokens(kind: str) -> None:
    with_them = load(kind).encode("the tide")
    without = load(kind).encode("the tide", add_special_tokens=False)
    assert list(without.token_ids) == list(with_them.token_ids)[1:-1]
    assert len(load(kind).encode("the tide turns", add_special_tokens=False, truncate_to=2)) == 2


def test_no_room_for_text_is_refused() -> None:
    tokenizer = load("bert")
    assert len(tokenizer.encode("the tide", truncate_to=3)) == 3
    with pytest.raises(InvalidRequestError, match="2 special") as refused:
        tokenizer.encode("the tide", truncate_to=2)
    assert refused.value.param == "truncate_prompt_tokens"
    with pytest.raises(InvalidRequestError, match="3 special"):
        tokenizer.encode("the tide", "turns", truncate_to=3)


@pytest.mark.parametrize("words", [2000, 20_000])
def test_a_long_text_is_cut_behind_a_token(words: int) -> None:
    text = "the tide turns " * (words // 3)
    assert load("bert").cut(text, 4) == "the tide turns the"
    assert load("bert").cut(text[:18], 5) == text[:18]


def test_a_tokenizer_may_say_that_it_gives_no_type_ids(tmp_path: Path) -> None:
    assert load("bert").encode("the", "tide").type_ids == [0, 0, 0, 1, 1]
    names = {"model_input_names": ["input_ids", "attention_mask"]}
    folder = zoo.changed("bert", tmp_path / "model", tokenizer_config=names)
    assert EncoderTokenizer.load(folder).encode("the", "tide").type_ids is None


def test_a_prompts_length_leaves_out_the_separator_behind_it() -> None:
    tokenizer = load("bert")
    assert tokenizer.prompt_length("the tide") == len(tokenizer.encode("the tide")) - 1
