"""Prefixes of prompts as numbers: equal beginnings have equal numbers, and no client can break them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tidewheel.ray.policy import Keys
from tidewheel.ray.prefixes import HeldPrefixes, body_keys, model_key, read_keys, session_key, unpacked, write_keys


def keys_of(**body: Any) -> Keys:
    return body_keys(json.dumps(body).encode())


def messages(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def test_a_conversation_keeps_its_numbers_as_it_grows() -> None:
    first, later = keys_of(messages=messages("a"), model="m"), keys_of(messages=messages("a", "b", "c"), model="m")
    assert [*later.prefixes][:1] == [*first.prefixes]
    assert len(later.prefixes) == 3
    assert later.model == model_key("m")


def test_messages_are_a_chat_and_texts_are_none() -> None:
    assert keys_of(messages=messages("a")).is_chat
    assert keys_of(input=messages("a"), instructions="be brief").is_chat
    for body in ({"prompt": "a"}, {"prompt": [1, 2]}, {"input": ["a", "b"]}, {"messages": []}, {}):
        assert not keys_of(**body).is_chat


def test_everything_before_counts() -> None:
    numbers = {
        tuple(keys_of(**body).prefixes)[-1]
        for body in (
            {"messages": messages("a", "b", "c")},
            {"messages": messages("x", "b", "c")},
            {"messages": messages("a", "b", "c"), "model": "adapter"},
            {"messages": messages("a", "b", "c"), "tools": [{"type": "function"}]},
            {"messages": messages("a", "b", "c"), "system": "be brief"},
            {"input": messages("a", "b"), "instructions": "be brief"},
        )
    }
    assert len(numbers) == 6


def test_a_system_prompt_alone_begins_the_chats_of_others() -> None:
    """Otherwise all chats with that system prompt would count as next turns of a request with only the prompt."""
    assert keys_of(messages=messages("a", "b")).is_chat
    for role in ("system", "developer"):
        assert not keys_of(messages=[{"role": role, "content": "a"}]).is_chat


def test_a_text_is_split_into_pieces() -> None:
    short, long = keys_of(prompt="x" * 1024), keys_of(prompt="x" * 3000)
    assert [*long.prefixes][:1] == [*short.prefixes]
    assert len(long.prefixes) == 3
    assert len(keys_of(prompt="x" * 900_000).prefixes) == 32
    assert keys_of(prompt="x" * 2_000_000) == Keys()


def test_tokens_are_split_into_pieces() -> None:
    """A number for each token would name the beginning of the first few alone, and take a proxy a second."""
    first = keys_of(prompt=[*range(256)])
    longer, other = keys_of(prompt=[*range(700)]), keys_of(prompt=[*range(10), *range(1000, 1690)])
    assert [*longer.prefixes][:1] == [*first.prefixes]
    assert (len(first.prefixes), len(longer.prefixes)) == (1, 3)
    assert {*longer.prefixes}.isdisjoint(other.prefixes)


def test_very_many_messages_are_known_by_those_that_were_looked_at() -> None:
    assert keys_of(messages=[{}] * 5000) == keys_of(messages=[{}] * 2048)
    assert keys_of(messages=[{}] * 2047) != keys_of(messages=[{}] * 2048)


def test_a_body_that_is_nested_deeply_has_no_prefix() -> None:
    nested: Any = "x"
    for _ in range(400):
        nested = [nested]
    for field in ("messages", "tools", "input"):
        keys = keys_of(model="m", prompt_cache_key="k", **{field: [nested]})
        assert keys == Keys(keys_of(prompt_cache_key="k").session, model_key("m"), [])


def test_a_session_is_the_same_in_the_header_and_in_the_body() -> None:
    of_header = session_key([(b"X-Session-Id", b"one")])
    assert of_header == keys_of(prompt_cache_key="one").session
    assert session_key([(b"accept", b"*/*")]) is None


def test_long_sessions_that_begin_alike_are_not_the_same() -> None:
    one, other = "x" * 60_000 + "1", "x" * 60_000 + "2"
    assert keys_of(prompt_cache_key=one).session == session_key([(b"x-session-id", one.encode())])
    assert keys_of(prompt_cache_key=one).session != keys_of(prompt_cache_key=other).session


@settings(deadline=None, max_examples=40)
@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps).map(str.encode)
)
def test_any_body_has_keys(body: bytes) -> None:
    keys = body_keys(body)
    assert read_keys(write_keys(keys)) == replace(keys, prefixes=[*keys.prefixes])


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=32), st.none() | st.integers(0, 2**64 - 1), st.booleans())
def test_a_header_has_the_keys(prefixes: list[int], session: int | None, is_chat: bool) -> None:
    keys = Keys(session, None, prefixes, is_chat)
    assert read_keys(write_keys(keys)) == keys


@settings(deadline=None)
@given(st.binary(max_size=2000))
def test_any_header_can_be_read(value: bytes) -> None:
    keys = read_keys(value)
    assert len(keys.prefixes) <= 32
    assert all(0 <= number < 2**64 for number in keys.prefixes)


def test_a_replica_publishes_the_newest() -> None:
    held = HeldPrefixes(most=3)
    for number in range(1, 6):
        held.add(Keys(prefixes=(number,)))
    assert {*unpacked(held.packed([9]))[0]} == {3, 4, 5, 9}
    for text in ("no such text", "", "AAAA", "!.!", "A.A.A"):
        assert unpacked(text) == ((), ())


def test_a_replica_publishes_which_prefixes_were_all_of_a_chat() -> None:
    held = HeldPrefixes()
    held.add(Keys(prefixes=(1, 2), is_chat=True))
    held.add(Keys(prefixes=(1, 2, 3, 4), is_chat=True))
    held.add(Keys(prefixes=(5, 6)))
    assert [{*numbers} for numbers in unpacked(held.packed([7]))] == [{1, 2, 3, 4, 5, 6, 7}, {2, 4}]
