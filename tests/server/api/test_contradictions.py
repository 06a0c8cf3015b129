"""Constraints that allow no token: only their own request gets an error, the same whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, ServerProcess, events

from tidewheel.server.generation.streaming import EventStream

pytest.importorskip("llguidance")  # not there on every machine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = {"prompt": "I am", "temperature": 1.0, "seed": 3, "max_tokens": 30}
DIGITS = [str(digit) for digit in range(10)]
AT_ONCE = {"guided_choice": ["ebb"], "bad_words": ["e", "eb", "ebb"]}
LATER = {"guided_regex": "a tide of [0-9]{9}", "bad_words": DIGITS}


def test_what_was_said_before_is_streamed_however_late(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes with the text, where the first frame takes longer than all that follows."""
    send = EventStream._send

    async def slowly(self: Any, *frame: Any, **options: Any) -> None:
        await send(self, *frame, **options)
        await asyncio.sleep(0.2)

    monkeypatch.setattr(EventStream, "_send", slowly)
    *chunks, last = events(server.post(COMPLETIONS, {**LATER, "prompt": "SAY(a tide of 1)", "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith("a tide of ")
    assert "error" in last


@pytest.mark.parametrize(
    ("fields", "names", "tokens"),
    [
        (AT_ONCE, "bad_words and the structured output", 0),
        ({"guided_choice": ["ebb"], "allowed_token_ids": [5]}, "allowed_token_ids and the structured output", 0),
        ({"allowed_token_ids": [5], "bad_words": ["%"]}, "allowed_token_ids and bad_words", 0),
        (LATER, "bad_words and the structured output", None),
    ],
    ids=str,
)
def test_the_error_says_which_constraints(
    demo_server: ServerProcess, fields: dict[str, Any], names: str, tokens: int | None
) -> None:
    with httpx.Client(base_url=demo_server.url, timeout=60, trust_env=False) as http:
        if "allowed_token_ids" in fields and "guided_choice" not in fields:
            token = http.post("/tokenize", json={"prompt": "%", "add_special_tokens": False}).json()["tokens"]
            fields = {**fields, "allowed_token_ids": token}
        whole = http.post(COMPLETIONS, json={**PROMPT, **fields})
        streamed = http.post(COMPLETIONS, json={**PROMPT, **fields, "stream": True})
    assert whole.status_code == 400
    error = whole.json()["error"]
    assert error["message"].startswith(f"{names} contradict each other")
    assert error["message"].endswith(f"after {tokens} tokens of the answer") == (tokens is not None)
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsatisfiable_constraints")
    if tokens == 0:
        assert (streamed.status_code, streamed.json()) == (400, whole.json())
    else:
        *chunks, last = events(streamed)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a tide of "
        assert last == whole.json()


def test_chats_and_demanded_calls_fail_alike(demo_server: ServerProcess) -> None:
    tool = {
        "type": "object",
        "properties": {"n": {"const": 123456789}},
        "required": ["n"],
        "additionalProperties": False,
    }
    with httpx.Client(base_url=demo_server.url, timeout=60, trust_env=False) as http:
        ids = http.post("/tokenize", json={"prompt": "".join(DIGITS), "add_special_tokens": False}).json()["tokens"]
        vocabulary = range(max(ids) + 1, max(ids) + 300)
        ask = {"messages": [{"role": "user", "content": "Hi"}], "allowed_token_ids": list(vocabulary)}
        named = {"type": "function", "function": {"name": "count"}}
        tools = [{"type": "function", "function": {"name": "count", "parameters": tool}}]
        chat = http.post(CHAT, json={**ask, "tools": tools, "tool_choice": named})
        assert chat.status_code == 400
        assert chat.json()["error"]["code"] == "unsatisfiable_constraints"
        formatted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": tool}}
        *_, last = events(http.post(CHAT, json={**ask, "response_format": formatted, "stream": True, "n": 2}))
        assert last["error"]["code"] == "unsatisfiable_constraints"


def test_logit_bias_chooses_and_never_forbids(demo_server: ServerProcess) -> None:
    with httpx.Client(base_url=demo_server.url, timeout=60, trust_env=False) as http:
        ids = http.post("/tokenize", json={"prompt": "ebb", "add_special_tokens": False}).json()["tokens"]
        body = {**PROMPT, "guided_choice": ["ebb"], "logit_bias": dict.fromkeys(ids, -100)}
        choice = http.post(COMPLETIONS, json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ebb", "stop")


def test_requests_beside_it_do_not_notice(demo_server: ServerProcess) -> None:
    kinds = ({}, {"guided_regex": "[a-z ]{9}"})
    good = [{**PROMPT, "seed": seed, "logprobs": 1, **fields} for seed in range(3) for fields in kinds]
    bad = [{**PROMPT, **fields} for fields in (AT_ONCE, LATER)] * 3

    async def ask(*bodies: Any) -> list[Any]:
        async with httpx.AsyncClient(base_url=demo_server.url, timeout=60, trust_env=False) as http:
            return [r.json() for r in await asyncio.gather(*(http.post(COMPLETIONS, json=body) for body in bodies))]

    alone = [asyncio.run(ask(body))[0]["choices"] for body in good]
    together = asyncio.run(ask(*(body for pair in zip(good, bad, strict=True) for body in pair)))
    assert [answer["choices"] for answer in together[::2]] == alone
    assert {answer["error"]["code"] for answer in together[1::2]} == {"unsatisfiable_constraints"}
