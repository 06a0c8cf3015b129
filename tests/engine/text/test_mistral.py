"""Mistral's own tokenizer files: texts and chats are encoded as mistral-common encodes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from engine.text.mistral_files import NUM_SPECIAL, sentencepiece_v3, tekken
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.errors import InvalidRequestError, ModelError
from tidewheel.engine.text.mistral import load_mistral
from tidewheel.engine.text.tokenizer import Tokenizer

pytest.importorskip("mistral_common")
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

TEXTS = ["", "the weather in Köln", "10 € [INST] </s> \n\n  x", "日本 🙂", "a\x00b"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "AbCdEf123", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
QUESTION = {"role": "user", "content": "the weather [/INST]?"}
TALKS: list[tuple[list[dict[str, Any]], Any]] = [
    ([QUESTION], None),
    ([{"role": "system", "content": "Be brief."}, QUESTION], TOOLS),
    (
        [
            QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "AbCdEf123", "name": "weather", "content": "sunny"},
        ],
        TOOLS,
    ),
]


@pytest.fixture(scope="module", params=["tekken-v3", "tekken-v7", "tekken-v11", "tekken-v13", "sentencepiece"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistral")
    return sentencepiece_v3(folder) if request.param == "sentencepiece" else tekken(folder, request.param[7:])


@pytest.fixture(scope="module")
def oracle(files: Path) -> Any:
    (path,) = files.iterdir()
    return MistralTokenizer.from_file(path)


@pytest.fixture(scope="module")
def tokenizer(files: Path) -> Tokenizer:
    return load_mistral(files)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_encoded_as_by_mistral_common(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    inner = oracle.instruct_tokenizer.tokenizer
    for special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == inner.encode(text, bos=special, eos=False)
        for skip, policy in ((True, SpecialTokenPolicy.IGNORE), (False, SpecialTokenPolicy.KEEP)):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == inner.decode(ids, special_token_policy=policy)
    assert not any(tokenizer.is_special(i) for i in tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(("messages", "tools"), TALKS)
def test_chats_are_encoded_as_by_mistral_common(
    tokenizer: Tokenizer, oracle: Any, messages: list[dict[str, Any]], tools: Any
) -> None:
    assert tokenizer.chat is not None
    expected = oracle.encode_chat_completion(ChatCompletionRequest.from_openai(messages, tools)).tokens
    assert tokenizer.chat.encode(messages, tools) == expected


def test_a_message_is_continued(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat is not None
    begun = [QUESTION, {"role": "assistant", "content": "It is"}]
    ids = tokenizer.chat.encode(begun, continue_final_message=True)
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids).endswith("It is")


def test_ids_of_other_servers_are_cut_to_what_the_format_takes(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat is not None
    messages = TALKS[2][0]
    long = [{**messages[1], "tool_calls": [{**CALL, "id": "call_00_AbCdEf123"}]}]
    answer = {**messages[2], "tool_call_id": "call_00_AbCdEf123"}
    assert tokenizer.chat.encode([QUESTION, *long, answer], TOOLS) == tokenizer.chat.encode(messages, TOOLS)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "I begin"}],
        [QUESTION, {"role": "tool", "tool_call_id": "AbCdEf123", "content": "sunny"}],
    ],
)
def test_what_the_format_cannot_say_is_the_requests_fault(tokenizer: Tokenizer, messages: Any) -> None:
    assert tokenizer.chat is not None
    with pytest.raises(InvalidRequestError, match="mistral-common does not take the messages"):
        tokenizer.chat.encode(messages)


def test_schemas_that_are_no_schemas_are_the_requests_fault(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat is not None
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"items": deep}
    for parameters in (deep, {"type": "nothing"}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        with pytest.raises(InvalidRequestError):
            tokenizer.chat.encode([QUESTION], tools)


@given(st.data())
def test_pieces_of_an_answer_are_its_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    first = next(i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i))
    ids = data.draw(st.lists(st.integers(first, tokenizer.vocab_size - 1), max_size=12))
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(ids)


def test_special_tokens_have_names(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<s>", "</s>", 2)
    call = tokenizer.token_to_id("[TOOL_CALLS]")
    assert call is not None
    assert tokenizer.is_special(call)
    assert tokenizer.id_to_token(call) == "[TOOL_CALLS]"
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None
    shown = tokenizer.detokenizer(shown=[call])
    assert shown.push(call) + shown.flush() == "[TOOL_CALLS]"
    hidden = tokenizer.detokenizer()
    assert hidden.push(call) + hidden.flush() == ""


def test_a_tekken_token_is_its_bytes(tmp_path: Path) -> None:
    tokenizer = load_mistral(tekken(tmp_path))
    first, second = tokenizer.encode("ä", add_special_tokens=False)
    assert tokenizer.token_texts([first, second, 1]) == ["ä".encode()[:1], "ä".encode()[1:], None]
    assert first >= NUM_SPECIAL


def test_a_folder_says_how_its_tokenizer_is_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"--tokenizer-mode mistral reads it, with mistral-common \(.*pip install"):
        Tokenizer.load(tekken(tmp_path))


def test_a_folder_without_such_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has neither tekken.json nor tokenizer.model.v3"):
        load_mistral(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"config": {"version": "v7"}}', '{"config": {"version": "v99"}}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tekken.json").write_text(content)
    with pytest.raises(ModelError, match=r"tekken.json is not a tokenizer that mistral-common can use"):
        load_mistral(tmp_path)


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mistral_common.tokens.tokenizers.mistral", None)
    with pytest.raises(ModelError, match=r"pip install 'mistral-common>="):
        load_mistral(tekken(tmp_path))
