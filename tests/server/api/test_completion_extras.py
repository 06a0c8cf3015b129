"""More than text in `/v1/completions`: prompts echoed and scored, the best of several, token ids, usage."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from server.conftest import RunningServer, ServerProcess, events

PATH = "/v1/completions"
PROMPT = "SAY(hey)YAS"


def complete(server: RunningServer, **body: Any) -> Any:
    response = server.post(PATH, {"prompt": PROMPT, **body})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(server: RunningServer, **body: Any) -> str:
    response = server.post(PATH, {"prompt": PROMPT, **body})
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    return message


def pieces(server: RunningServer, **body: Any) -> list[Any]:
    response = server.post(PATH, {"prompt": PROMPT, **body, "stream": True})
    return [choice for chunk in events(response) for choice in chunk["choices"]]


def test_an_echo_is_the_prompt_and_then_the_answer(server: RunningServer) -> None:
    assert complete(server, echo=True)["choices"][0]["text"] == PROMPT + "hey"
    by_ids = complete(server, prompt=[256, *PROMPT.encode()], echo=True, n=2)
    assert [choice["text"] for choice in by_ids["choices"]] == [PROMPT + "hey"] * 2
    with_special = complete(server, prompt=[256, *PROMPT.encode()], echo=True, skip_special_tokens=False)
    assert with_special["choices"][0]["text"] == "<bos>" + PROMPT + "hey"
    streamed = pieces(server, prompt=[PROMPT, "SAY(b)YAS"], echo=True, n=2)
    for index, expected in enumerate([PROMPT + "hey"] * 2 + ["SAY(b)YASb"] * 2):
        assert "".join(piece["text"] for piece in streamed if piece["index"] == index) == expected


@pytest.mark.parametrize("streamed", [False, True])
def test_an_echo_with_logprobs_scores_the_prompt(server: RunningServer, streamed: bool) -> None:
    body = {"echo": True, "logprobs": 2, "n": 2}
    choices: list[Any]
    if streamed:
        found = pieces(server, **body)
        choices = [
            {
                field: [x for p in found if p["index"] == i for x in p["logprobs"][field]]
                for field in found[0]["logprobs"]
            }
            for i in range(2)
        ]
    else:
        choices = [choice["logprobs"] for choice in complete(server, **body)["choices"]]
    for logprobs in choices:
        assert logprobs["tokens"] == ["<bos>", *PROMPT, *"hey", "<eos>"]
        assert logprobs["token_logprobs"] == [None] + [-0.25] * (len(PROMPT) + 4)
        assert logprobs["text_offset"][:3] == [0, 5, 6]
        assert logprobs["top_logprobs"][:2] == [None, {"S": -0.25, "T": -1.25}]
        assert len(logprobs["top_logprobs"]) == len(logprobs["tokens"])


@pytest.mark.parametrize("streamed", [False, True])
def test_an_echo_may_be_all_that_is_wanted(server: RunningServer, streamed: bool) -> None:
    body = {"echo": True, "max_tokens": 0, "logprobs": 0}
    choices = pieces(server, **body) if streamed else complete(server, **body)["choices"]
    (choice,) = choices
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.25] * len(PROMPT)
    assert complete(server, echo=True, max_tokens=0)["usage"]["completion_tokens"] == 0


def test_a_prompt_that_fills_the_context_can_be_scored(server: RunningServer) -> None:
    answer = complete(server, prompt=[97] * 8192, echo=True, max_tokens=0, logprobs=0)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 8192


def test_prompt_logprobs_have_vllms_shape(server: RunningServer) -> None:
    for choice in complete(server, prompt_logprobs=1, n=2)["choices"]:
        first, second, *rest = choice["prompt_logprobs"]
        assert first is None
        assert second == {"83": {"logprob": -0.25, "rank": 1, "decoded_token": "S"}}
        assert len(rest) == len(PROMPT) - 1
    only = complete(server, prompt=[97], prompt_logprobs=0, max_tokens=0)["choices"][0]
    assert (only["prompt_logprobs"], only["text"]) == ([None], "")
    both = complete(server, prompt_logprobs=0, echo=True, logprobs=3)["choices"][0]
    assert [len(place) for place in both["prompt_logprobs"][1:]] == [1] * len(PROMPT)
    assert len(both["logprobs"]["top_logprobs"][1]) == 3
    assert "prompt_logprobs" not in complete(server)["choices"][0]
    assert "leave out stream" in refusal(server, prompt_logprobs=1, stream=True)


def test_the_best_of_several_are_chosen(server: RunningServer) -> None:
    answer = complete(server, best_of=4, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 4 * len("hey.")
    assert "the best are known only at the end" in refusal(server, best_of=2, stream=True)
    assert len(pieces(server, best_of=2, n=2)) >= 2


def test_token_ids_come_on_request(server: RunningServer) -> None:
    prompt_ids, answer_ids = [256, *PROMPT.encode()], [*b"hey", 257]
    for choice in complete(server, return_token_ids=True, n=2)["choices"]:
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt_ids, answer_ids)
    streamed = pieces(server, return_token_ids=True)
    assert streamed[0]["prompt_token_ids"] == prompt_ids
    assert all("prompt_token_ids" not in piece for piece in streamed[1:])
    assert [token for piece in streamed for token in piece["token_ids"]] == answer_ids


def test_tokens_can_be_named_by_their_ids(server: RunningServer) -> None:
    logprobs = complete(server, logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:104", "token_id:101", "token_id:121", "token_id:257"]
    assert logprobs["top_logprobs"][0] == {"token_id:104": -0.25}
    assert logprobs["text_offset"] == [0, 1, 2, 3]


def test_prompts_are_cut_to_their_last_tokens(server: RunningServer) -> None:
    def used(**body: Any) -> str:
        return bytes(complete(server, return_token_ids=True, **body)["choices"][0]["prompt_token_ids"]).decode()

    assert used(prompt="abcdef", truncate_prompt_tokens=3) == "def"
    assert used(prompt=[97, 98, 99], truncate_prompt_tokens=2) == "bc"
    assert used(prompt=[97, 98, 99], truncate_prompt_tokens=2, truncation_side="right") == "ab"
    assert used(prompt=[97, 98, 99], truncate_prompt_tokens=9) == "abc"
    assert len(used(prompt="b" * 9000, truncate_prompt_tokens=-1)) == 8191
    assert complete(server, prompt="abcdef", truncate_prompt_tokens=3, echo=True)["choices"][0]["text"] == "defok"


def test_usage_may_come_with_every_chunk(server: RunningServer) -> None:
    def usages(**options: bool) -> list[Any]:
        return [
            chunk["usage"]
            for chunk in events(server.post(PATH, {"prompt": PROMPT, "stream": True, "stream_options": options}))
        ]

    every = usages(include_usage=True, continuous_usage_stats=True)
    counts = [usage["completion_tokens"] for usage in every]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert all(usage["prompt_tokens"] == 1 + len(PROMPT) for usage in every)
    assert all(usage is None for usage in usages(include_usage=True, continuous_usage_stats=False)[:-1])


def test_an_answers_id_is_the_clients_if_it_has_one(server: RunningServer) -> None:
    assert complete(server, request_id="mine-7")["id"] == "cmpl-mine-7"
    assert complete(server)["id"] != complete(server)["id"]


def test_what_is_not_supported_says_what_to_do_instead(server: RunningServer) -> None:
    assert "fill-in-the-middle" in refusal(server, suffix="b")
    assert "use logit_bias" in refusal(server, logits_processors=["x"])
    assert "send text or token ids" in refusal(server, prompt_embeds="AAAA")


def test_a_sdk_scores_continuations(dummy_server: ServerProcess) -> None:
    """As evaluation harnesses do: the log-probability of an ending is the sum over its tokens in an echo."""
    with openai.OpenAI(base_url=f"{dummy_server.url}/v1", api_key="secret", max_retries=0) as sdk:
        body: Any = {"model": "tiny", "prompt": "The tide turns", "temperature": 0, "logprobs": 5}
        generated = sdk.completions.create(**body, max_tokens=8)
        ids: Any = {"return_token_ids": True}
        whole = sdk.completions.create(**body, max_tokens=8, extra_body=ids).choices[0]
        extra = whole.model_extra or {}
        tokens = [*extra["prompt_token_ids"], *extra["token_ids"]]
        scored = sdk.completions.create(**{**body, "prompt": tokens}, echo=True, max_tokens=0)
        sampled, echoed = generated.choices[0].logprobs, scored.choices[0].logprobs
        assert sampled is not None
        assert echoed is not None
        assert sampled.token_logprobs is not None
        assert echoed.token_logprobs is not None
        assert echoed.top_logprobs is not None
        assert sampled.top_logprobs is not None
        count = len(sampled.token_logprobs)
        assert echoed.token_logprobs[-count:] == sampled.token_logprobs
        assert echoed.top_logprobs[-count:] == sampled.top_logprobs
        asked: Any = {"prompt_logprobs": 5}
        places = (sdk.completions.create(**body, max_tokens=1, extra_body=asked).choices[0].model_extra or {})[
            "prompt_logprobs"
        ]
        assert places[0] is None
        assert all(sorted(t["rank"] for t in place.values())[:5] == [1, 2, 3, 4, 5] for place in places[1:])


def test_the_best_are_those_with_the_highest_mean_logprob(dummy_server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{dummy_server.url}/v1", api_key="secret", max_retries=0) as sdk:
        body: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 6, "seed": 3, "logprobs": 0}

        def means(**options: int) -> list[float]:
            found = []
            for choice in sdk.completions.create(**body, **options).choices:
                assert choice.logprobs is not None
                assert choice.logprobs.token_logprobs
                logprobs = [value for value in choice.logprobs.token_logprobs if value is not None]
                found.append(sum(logprobs) / len(logprobs))
            return found

        assert means(n=2, best_of=6) == sorted(means(n=6), reverse=True)[:2]


def test_beams_are_searched(dummy_server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{dummy_server.url}/v1", api_key="secret", max_retries=0) as sdk:
        body: Any = {"model": "tiny", "prompt": "The tide turns", "max_tokens": 12, "logprobs": 1}

        def totals(n: int, **extra: Any) -> list[float]:
            answer = sdk.completions.create(
                **body, n=n, extra_body={"use_beam_search": True, "ignore_eos": True, **extra}
            )
            found = []
            for choice in answer.choices:
                assert choice.logprobs is not None
                assert choice.logprobs.token_logprobs is not None
                assert choice.logprobs.tokens is not None
                assert len(choice.logprobs.tokens) == 12
                assert choice.finish_reason == "length"
                found.append(sum(value for value in choice.logprobs.token_logprobs if value is not None))
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 12 * n
            return found

        four = totals(4)
        assert four == sorted(four, reverse=True)
        assert four == totals(4, temperature=0)
        assert totals(2, best_of=4) == four[:2]
        assert totals(1)[0] <= four[0]
        assert totals(2, temperature=5.0)[0] < four[0], "hotter distributions are flatter"
        chat = sdk.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            n=3,
            max_tokens=8,
            extra_body={"use_beam_search": True, "length_penalty": 0.5, "return_token_ids": True},
        )
        assert len({tuple((choice.model_extra or {})["token_ids"]) for choice in chat.choices}) == 3


def test_beams_where_they_make_no_sense_are_refused(server: RunningServer) -> None:
    def param(**body: Any) -> str:
        response = server.post(PATH, {"prompt": PROMPT, "use_beam_search": True, **body})
        assert response.status_code == 400
        found: str = response.json()["error"]["param"]
        return found

    assert param(stream=True) == "use_beam_search"
    assert param(top_p=0.5) == "top_p"
    assert param(stop="x") == "stop"
    assert param(n=100) == "n"
    assert param(n=2, best_of=129) == "best_of"
    assert param(early_stopping=True) == "early_stopping"
    assert param(n=64, max_tokens=8000) == "max_tokens"
    assert "left out without beam search" in refusal(server, length_penalty=0.5)
    assert len(complete(server, use_beam_search=True, n=2, max_tokens=3, top_p=1.0, seed=4)["choices"]) == 2
