"""The openai SDK against the real command: a process, a socket, a model (its weights are random)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server.conftest import ServerProcess

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count to ten, bitte schön."}]
GREEDY: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def client(dummy_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{dummy_server.url}/v1", api_key="secret", max_retries=0) as sdk:
        yield sdk


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_chat_streamed_and_whole_are_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.completion_tokens <= 24
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_logprobs(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
    shape = whole.choices[0].logprobs
    assert whole.usage is not None
    assert shape is not None
    assert shape.content is not None
    assert len(shape.content) == whole.usage.completion_tokens
    for entry in shape.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0  # greedy takes the likeliest


def test_seeds_and_n(client: openai.OpenAI) -> None:
    sampled: Any = {**GREEDY, "temperature": 1.0, "seed": 7, "n": 3}
    first, second = (client.chat.completions.create(**sampled) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3
    other = client.chat.completions.create(**{**sampled, "seed": 8})
    assert [choice.message.content for choice in other.choices] != texts


def test_completions(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    by_text = client.completions.create(prompt=["Hello", "Good day"], **body, logprobs=2)
    assert [choice.index for choice in by_text.choices] == [0, 1]
    assert by_text.usage is not None
    for choice in by_text.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert len(choice.logprobs.tokens) <= 12
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(prompt=["Hello", "Good day"], **body, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == {choice.index: choice.text for choice in by_text.choices}


def test_text_and_token_ids_are_the_same_prompt(client: openai.OpenAI) -> None:
    tokens = client.post("/../tokenize", body={"prompt": "Hello"}, cast_to=dict[str, Any])["tokens"]
    body: Any = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    by_ids = client.completions.create(prompt=tokens, **body)
    assert by_ids.choices[0].text == client.completions.create(prompt="Hello", **body).choices[0].text


def test_stop(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(**GREEDY).choices[0].message.content
    assert text
    stop = text[len(text) // 2 :][:3]
    cut = client.chat.completions.create(**GREEDY, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == text[: text.index(stop)]


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**{**GREEDY, "temperature": -1})
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="word " * 1000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_many_requests_at_once_get_what_each_gets_alone(client: openai.OpenAI, dummy_server: ServerProcess) -> None:
    def question(i: int) -> Any:
        return {**GREEDY, "messages": [{"role": "user", "content": f"Question {i}: " + "why " * i}], "logprobs": True}

    def answer(completion: Any) -> Any:
        choice = completion.choices[0]
        return choice.message.content, [entry.logprob for entry in choice.logprobs.content]

    async def together() -> list[Any]:
        url = f"{dummy_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as sdk:
            return list(await asyncio.gather(*(sdk.chat.completions.create(**question(i)) for i in range(24))))

    alone = [answer(client.chat.completions.create(**question(i))) for i in range(24)]
    assert [answer(completion) for completion in asyncio.run(together())] == alone


def test_a_stream_that_is_left_early_frees_the_engine(client: openai.OpenAI, dummy_server: ServerProcess) -> None:
    body: Any = {**GREEDY, "max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(**body) as stream:
        next(iter(stream))
    assert client.chat.completions.create(**GREEDY).choices[0].message.content
    assert dummy_server.process.poll() is None
