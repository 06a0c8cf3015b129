"""vLLM's extras in `/v1/chat/completions`: scored and truncated prompts, token ids, usage in every chunk."""

from __future__ import annotations

from typing import Any

import pytest
from server.conftest import RunningServer, events

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "SAY(hey)YAS"}]
RENDERED = "<user>SAY(hey)YAS<assistant>"


def chat(server: RunningServer, **body: Any) -> Any:
    response = server.post(PATH, {"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(server: RunningServer, **body: Any) -> list[Any]:
    return events(server.post(PATH, {"messages": HELLO, **body, "stream": True}))


def test_prompts_are_scored(server: RunningServer) -> None:
    scored = chat(server, prompt_logprobs=0)["prompt_logprobs"]
    assert len(scored) == len(RENDERED)
    assert scored[:2] == [None, {"117": {"logprob": -0.25, "rank": 1, "decoded_token": "u"}}]
    assert "prompt_logprobs" not in chat(server)
    refused = server.post(PATH, {"messages": HELLO, "prompt_logprobs": 0, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_token_ids_come_on_request(server: RunningServer) -> None:
    whole = chat(server, return_token_ids=True, n=2)
    assert bytes(whole["prompt_token_ids"]).decode() == RENDERED
    assert [choice["token_ids"] for choice in whole["choices"]] == [[*b"hey", 257]] * 2
    streamed = chunks(server, return_token_ids=True)
    assert bytes(streamed[0]["prompt_token_ids"]).decode() == RENDERED
    assert all("prompt_token_ids" not in chunk for chunk in streamed[1:])
    ids = [token for chunk in streamed for choice in chunk["choices"] for token in choice.get("token_ids", [])]
    assert ids == [*b"hey", 257]


def test_tokens_can_be_named_by_their_ids(server: RunningServer) -> None:
    entry = chat(server, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert entry["content"][0]["token"] == "token_id:104"
    assert entry["content"][0]["top_logprobs"][0] == {"token": "token_id:104", "logprob": -0.25, "bytes": [104]}


@pytest.mark.parametrize("return_ids", [False, True])
def test_usage_may_come_with_every_chunk(server: RunningServer, return_ids: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = chunks(server, stream_options=options, return_token_ids=return_ids)
    counts = [chunk["usage"]["completion_tokens"] for chunk in streamed]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 4)
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
               for usage in (chunk["usage"] for chunk in streamed))  # fmt: skip
    text = "".join(choice["delta"].get("content") or "" for chunk in streamed for choice in chunk["choices"])
    assert text == "hey"


def test_prompts_are_truncated_and_answers_named(server: RunningServer) -> None:
    answer = chat(server, truncate_prompt_tokens=11, return_token_ids=True, request_id="mine")
    assert bytes(answer["prompt_token_ids"]).decode() == RENDERED[-11:]
    assert answer["id"] == "chatcmpl-mine"


def test_only_a_search_may_have_more_beams_than_choices(server: RunningServer) -> None:
    refused = server.post(PATH, {"messages": HELLO, "best_of": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")
    assert len(chat(server, best_of=3, n=2, use_beam_search=True, max_tokens=4)["choices"]) == 2
