"""/v1/completions over a socket."""

from __future__ import annotations

from typing import Any

import pytest
from server.conftest import RunningServer, events

PATH = "/v1/completions"


def complete(server: RunningServer, **body: Any) -> Any:
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: RunningServer, **body: Any) -> list[Any]:
    return events(server.post(PATH, {**body, "stream": True}))


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_a_whole_answer(server: RunningServer) -> None:
    answer = complete(server, model="scripted", prompt="SAY(hello)YAS")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "scripted"
    assert answer["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    prompt_tokens, completion_tokens = 1 + len("SAY(hello)YAS"), len("hello") + 1
    usage = answer["usage"]
    assert usage["prompt_tokens"] == prompt_tokens
    assert usage["completion_tokens"] == completion_tokens
    assert usage["total_tokens"] == prompt_tokens + completion_tokens


def test_a_stream_adds_up_to_the_whole_answer(server: RunningServer) -> None:
    prompt = "SAY(grüße, 你好 🌊)YAS"
    chunks = stream(server, prompt=prompt, max_tokens=100)
    assert text_of(chunks) == "grüße, 你好 🌊" == complete(server, prompt=prompt, max_tokens=100)["choices"][0]["text"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1] == "stop"
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_comes_last_when_it_is_asked_for(server: RunningServer) -> None:
    chunks = stream(server, prompt="SAY(abc)YAS", stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == complete(server, prompt="SAY(abc)YAS")["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }


def test_the_default_length_is_openais(server: RunningServer) -> None:
    answer = complete(server, prompt="LOOP(")
    assert answer["choices"][0]["text"] == "x" * 16
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("streamed", [False, True])
def test_every_form_of_prompt(server: RunningServer, streamed: bool) -> None:
    texts = ["SAY(one)YAS", "SAY(two)YAS"]
    ids = [list(text.encode()) for text in texts]
    for prompt, expected in (
        (texts, ["one", "two"]),
        (ids[0], ["one"]),
        (ids, ["one", "two"]),
        (texts[0], ["one"]),
    ):
        if streamed:
            chunks = stream(server, prompt=prompt)
            assert [text_of(chunks, i) for i in range(len(expected))] == expected
        else:
            choices = complete(server, prompt=prompt)["choices"]
            assert [c["text"] for c in choices] == expected
            assert [c["index"] for c in choices] == list(range(len(expected)))


def test_choices_count_over_prompts_and_then_over_n(server: RunningServer) -> None:
    body = {"prompt": ["SAY(one)YAS", "SAY(two)YAS"], "n": 2}
    answer = complete(server, **body)
    assert [c["text"] for c in answer["choices"]] == ["one", "one", "two", "two"]
    assert answer["usage"]["prompt_tokens"] == 2 * (1 + len("SAY(one)YAS"))
    assert answer["usage"]["completion_tokens"] == 4 * len("one.")
    chunks = stream(server, **body)
    assert [text_of(chunks, i) for i in range(4)] == ["one", "one", "two", "two"]


def test_logprobs_in_the_legacy_shape(server: RunningServer) -> None:
    logprobs = complete(server, prompt="SAY(hey)YAS", logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "e", "y", "<eos>"]
    assert logprobs["token_logprobs"] == [-0.25] * 4
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"][0] == {"h": -0.25, "i": -1.25}
    streamed = [c["logprobs"] for chunk in stream(server, prompt="SAY(hey)YAS", logprobs=2) for c in chunk["choices"]]
    for field in logprobs:
        assert [item for piece in streamed for item in piece[field]] == logprobs[field]


def test_logprobs_zero_reports_the_sampled_token_only(server: RunningServer) -> None:
    logprobs = complete(server, prompt="SAY(hey)YAS", logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] == {"h": -0.25}


def test_stop_strings_and_stop_tokens(server: RunningServer) -> None:
    choice = complete(server, prompt="SAY(one, two)YAS", stop=", ")["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", ", ")
    choice = complete(server, prompt="SAY(one, two)YAS", stop_token_ids=[ord("t")])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one, ", "stop", ord("t"))
    choice = complete(server, prompt="SAY(one, two)YAS", stop=["w"], include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "one, tw"


def test_sampling_parameters_reach_the_engine(server: RunningServer) -> None:
    wanted = {
        "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "seed": 11, "max_tokens": 3, "min_tokens": 2,
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "ignore_eos": True,
        "skip_special_tokens": False, "n": 2,
    }  # fmt: skip
    complete(server, prompt="SAY(abc)YAS", logit_bias={"5": -1.5}, priority=-3, cache_salt="salt", **wanted)
    request = server.engine.requests[-1]
    assert {name: getattr(request.sampling, name) for name in wanted} == wanted
    assert request.sampling.logit_bias == {5: -1.5}
    assert (request.priority, request.cache_salt) == (-3, "salt")


def test_the_models_own_defaults_apply_where_a_request_is_silent(server: RunningServer) -> None:
    complete(server, prompt="SAY(abc)YAS")
    assert server.engine.requests[-1].sampling.temperature == 0.5
    complete(server, prompt="SAY(abc)YAS", temperature=0)
    assert server.engine.requests[-1].sampling.temperature == 0.0


def test_nulls_are_as_good_as_absent(server: RunningServer) -> None:
    nulls = (
        "model", "max_tokens", "temperature", "top_p", "n", "stop", "logprobs", "echo", "suffix", "best_of", "seed",
        "stream", "stream_options", "logit_bias", "user", "prompt_logprobs", "guided_json",
    )  # fmt: skip
    assert complete(server, prompt="SAY(abc)YAS", **dict.fromkeys(nulls))["choices"][0]["text"] == "abc"


def test_fields_that_change_nothing_are_accepted(server: RunningServer) -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "best_of": 1,
        "session_id": "s",
    }
    assert complete(server, prompt="SAY(abc)YAS", echo=False, suffix="", **harmless)["choices"][0]["text"] == "abc"


def test_one_failing_request_is_its_own(server: RunningServer) -> None:
    failed = server.post(PATH, {"prompt": "BREAK("})
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "generation_failed"
    broken = server.post(PATH, {"prompt": "BREAK(", "stream": True})
    assert broken.status_code == 200
    assert '"error"' in broken.text.split("\n\n")[-3]
    assert complete(server, prompt="SAY(abc)YAS")["choices"][0]["text"] == "abc"
