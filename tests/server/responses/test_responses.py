"""`/v1/responses` over a socket: items in and out, what is kept, what runs on, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import tracemalloc
from typing import Any

import httpx
import msgspec
import pytest
from server.conftest import RunningServer, ServerProcess, StartServer, named_events

from tidewheel.server.protocol.decode import BodyDecoder, ParameterNotes
from tidewheel.server.protocol.responses import Response, ResponsesRequest
from tidewheel.server.responses.assembly import new_item_id
from tidewheel.server.responses.custom_input import CustomInput
from tidewheel.server.responses.store import ResponseStore, StoredResponse, held_bytes
from tidewheel.server.responses.translation import prepare_body

PATH = "/v1/responses"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    return start_server(tool_call_parser="hermes", reasoning_parser="qwen3")


def say(text: str) -> str:
    return f"SAY({text})YAS"


def create(server: RunningServer, asked: Any, /, **body: Any) -> Any:
    response = server.post(PATH, {"input": asked, **body})
    assert response.status_code == 200, response.text
    return response.json()


def text_of(response: Any) -> str:
    return "".join(p["text"] for item in response["output"] if item["type"] == "message" for p in item["content"])


def prompt_of(server: RunningServer) -> str:
    """The last prompt that the engine was given."""
    return server.engine.tokenizer.decode(list(server.engine.requests[-1].prompt_token_ids))


def error_of(server: RunningServer, body: Any, path: str = PATH) -> Any:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def get(server: RunningServer, path: str, **params: Any) -> Any:
    response = server.http.get(f"{PATH}/{path}", params=params)
    assert response.status_code == 200, response.text
    return response.json()


def message(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


# Answers.


def test_a_response_says_what_was_asked_and_what_came_of_it(server: RunningServer) -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.", "max_output_tokens": 200, "metadata": {"a": "b"}, "temperature": 0.25,
        "top_p": 0.5, "tools": [ADD], "tool_choice": "auto", "parallel_tool_calls": False, "user": "u",
        "max_tool_calls": 3, "prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto",
        "truncation": "auto", "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": "low"},
    }  # fmt: skip
    response = create(server, say(f"<think>hm</think>Sure.\n{CALL}"), **asked)
    reasoning, said, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert reasoning["summary"] == []
    assert said["content"] == [{"type": "output_text", "text": "Sure.", "annotations": [], "logprobs": []}]
    assert (said["role"], said["status"]) == ("assistant", "completed")
    assert (call["name"], json.loads(call["arguments"]), call["status"]) == ("add", {"a": 1}, "completed")
    assert call["call_id"] != call["id"]
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    assert response["completed_at"] >= response["created_at"]
    for name in asked.keys() - {"service_tier", "tools"}:
        assert response[name] == asked[name]
    assert response["tools"][0]["name"] == "add"
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": len("<think>hm</think>")}
    assert prompt_of(server).startswith("<system>Be brief.<user>SAY(")


def test_defaults_are_told(server: RunningServer) -> None:
    response = create(server, "hi")
    assert (response["model"], response["temperature"], response["top_p"]) == ("scripted", 0.5, 1.0)
    assert response["text"] == {"format": {"type": "text"}}
    assert response["tool_choice"] == "auto"
    assert response["store"] is True
    assert text_of(response) == "ok"


def test_the_prefix_cache_is_told(server: RunningServer) -> None:
    text = say("cached") * 8
    create(server, text, cache_salt="told")
    assert create(server, text, cache_salt="told")["usage"]["input_tokens_details"]["cached_tokens"] > 16


def test_a_response_that_is_cut_off(server: RunningServer) -> None:
    response = create(server, say("Hello."), max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert text_of(response) == "Hel"


def test_an_answer_without_text_is_an_empty_message(server: RunningServer) -> None:
    (item,) = create(server, say(""))["output"]
    assert [part["text"] for part in item["content"]] == [""]


@pytest.mark.parametrize(
    "text", ["Hello.", f"<think>hm</think>Sure.\n{CALL}\n{CALL} Done.", "", "<think>never ends", "x" * 40]
)
def test_streamed_and_whole_are_the_same(server: RunningServer, text: str) -> None:
    body: dict[str, Any] = {"tools": [ADD], "max_output_tokens": 300 if text.strip("x") else 20}
    whole = create(server, say(text), **body)
    received = named_events(server.post(PATH, {"input": say(text), "stream": True, **body}))
    assert [event["sequence_number"] for event in received] == list(range(len(received)))
    assert [event["type"] for event in received[:2]] == ["response.created", "response.in_progress"]
    assert received[0]["response"]["output"] == []
    last = received[-1]
    assert last["type"] == f"response.{whole['status']}"
    for name in ("output", "usage", "status", "incomplete_details"):
        assert without_ids(last["response"][name]) == without_ids(whole[name])
    assert replayed(received) == last["response"]["output"]


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "cached_tokens")}
    return value


def replayed(received: list[Any]) -> list[Any]:
    """A client's result from the deltas; checks that each item and part is opened, sent and closed in order."""
    output: list[Any] = []
    parts: list[Any] = []
    for event in received[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            assert event["item"]["status"] == "in_progress"
            output.append(event["item"])
            parts = []
            continue
        assert event["output_index"] == len(output) - 1
        item = output[-1]
        if kind == "output_item.done":
            if item["type"] == "function_call":
                item["status"] = event["item"]["status"]
            else:
                item.update(content=parts, status=event["item"]["status"])
            assert event["item"] == item
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            parts.append(event["part"])
        elif kind == "content_part.done":
            assert event["part"] == parts[event["content_index"]]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        elif kind.endswith(".delta"):
            parts[event["content_index"]]["text"] += event["delta"]
        else:
            assert kind in ("output_text.done", "reasoning_text.done")
            assert event["text"] == parts[event["content_index"]]["text"]
    return output


def test_logprobs_are_those_of_the_text(server: RunningServer) -> None:
    text = say("<think>hm</think>Hi")
    for body in ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}):
        (part,) = create(server, text, **body)["output"][1]["content"]
        assert "".join(entry["token"] for entry in part["logprobs"])[-2:] == "Hi"
        assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {body.get("top_logprobs", 0)}
    received = named_events(server.post(PATH, {"input": text, "top_logprobs": 2, "stream": True}))
    streamed = [e for event in received if event["type"] == "response.output_text.delta" for e in event["logprobs"]]
    (done,) = [event for event in received if event["type"] == "response.output_text.done"]
    assert streamed == done["logprobs"] == part["logprobs"]
    (said,) = server.post(PATH, {"input": "SAY(Köln 🦩)YAS", "top_logprobs": 1}).json()["output"]
    (part,) = said["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode() == part["text"] == "Köln 🦩"


def test_a_stream_that_breaks_says_so(server: RunningServer) -> None:
    received = named_events(server.post(PATH, {"input": "BREAK(", "stream": True}))
    last = received[-1]
    assert last["type"] == "response.failed"
    assert last["sequence_number"] == len(received) - 1
    assert last["response"]["status"] == "failed"
    assert "cannot be turned into text" in last["response"]["error"]["message"]
    assert last["response"]["error"]["code"] == "server_error"


# Conversations.


def test_all_kinds_of_items(server: RunningServer) -> None:
    create(
        server,
        [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            message("Hi."),
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "One moment.", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "now", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
            message("Noon.", "assistant"),
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ],
    )  # fmt: skip
    assert prompt_of(server) == (
        '<system>Rules.<user>Hi.<assistant>One moment.[add {"a": 1}][now {}][tool c1]<tool>2[tool c2]<tool>noon'
        "<assistant>Noon.<assistant>No.<assistant>"
    )


TURNS = "{% for m in messages %}<{{ m.role }}>({{ m.reasoning_content }}){{ m.content }}{% endfor %}"


def test_reasoning_goes_back_to_the_template(start_server: StartServer) -> None:
    server = start_server(engine={"template": TURNS + "<assistant>"}, reasoning_parser="qwen3")
    asked: Any = [message(say("<think>hm</think>Four."))]
    first = create(server, asked, store=False, include=["reasoning.encrypted_content"])
    assert first["store"] is False
    shown, sealed = (dict(first["output"][0]) for _ in range(2))
    shown["encrypted_content"], sealed["content"] = None, None
    for reasoning in (shown, sealed):
        create(server, [*asked, reasoning, first["output"][1], message("ok")], store=False)
        assert "<assistant>(hm)Four.<user>" in prompt_of(server)


def test_a_conversation_goes_on_from_a_response(server: RunningServer) -> None:
    first = create(server, say(f"Sure.\n{CALL}"), tools=[ADD], instructions="First.")
    call = first["output"][1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "two. SAY(2.)YAS"}
    second = create(server, [result], previous_response_id=first["id"], instructions="Second.", store=True)
    assert (text_of(second), second["previous_response_id"]) == ("2.", first["id"])
    assert prompt_of(server).startswith("<system>Second.<user>SAY(Sure.")
    assert f'Sure.[add {{"a": 1}}][tool {call["call_id"]}]<tool>two.' in prompt_of(server)
    third = create(server, say("bye"), previous_response_id=second["id"])
    assert text_of(third) == "bye"
    assert "<tool>two. SAY(2.)YAS<assistant>2.<user>" in prompt_of(server)
    items = get(server, f"{third['id']}/input_items", order="asc")["data"]
    assert [item["type"] for item in items] == [
        "message", "message", "function_call", "function_call_output", "message", "message",
    ]  # fmt: skip


def test_an_item_may_be_named_by_its_id(server: RunningServer) -> None:
    first = create(server, say("One."))
    create(server, [{"id": first["output"][0]["id"]}, message("and?")])
    assert prompt_of(server) == "<assistant>One.<user>and?<assistant>"
    error = error_of(server, {"input": [{"type": "item_reference", "id": "msg_0"}]})
    assert error["param"] == "input[0].id"


def test_the_oldest_turns_make_room(start_server: StartServer) -> None:
    server = start_server(engine={"max_model_len": 256})
    turns = [turn for i in range(20) for turn in (message(f"question {i}"), message(f"answer {i}", "assistant"))]
    body: Any = {"input": [message("Rules.", "system"), *turns, message(say("fits"))], "max_output_tokens": 9}
    assert error_of(server, body)["code"] == "context_length_exceeded"
    assert error_of(server, body)["param"] == "input"
    response = create(server, body["input"], max_output_tokens=9, truncation="auto")
    assert text_of(response) == "fits"
    prompt = prompt_of(server)
    assert prompt.startswith("<system>Rules.<user>question ")
    assert "question 19" in prompt
    assert "question 0" not in prompt
    too_long: Any = {"input": "a" * 300, "truncation": "auto"}
    assert error_of(server, too_long)["code"] == "context_length_exceeded"


def test_tokens_are_counted(server: RunningServer) -> None:
    body: Any = {"input": "Hi.", "instructions": "Be brief.", "tools": [ADD]}
    counted = server.post(f"{PATH}/input_tokens", body).json()
    usage = create(server, "Hi.", instructions="Be brief.", tools=[ADD])["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    assert server.post(f"{PATH}/input_tokens", {"input": "a" * 9000}).json()["input_tokens"] > 9000


@pytest.mark.parametrize("effort", ["none", "high"])
def test_effort_none_switches_thinking_off(start_server: StartServer, effort: str) -> None:
    template = "{{ messages[0].content }}{{ reasoning_effort }}{% if enable_thinking is false %} at once{% endif %}"
    server = start_server(engine={"template": template})
    create(server, "hi", reasoning={"effort": effort})
    assert prompt_of(server) == ("hinone at once" if effort == "none" else "hihigh")


# What is kept.


def test_retrieve_and_delete(server: RunningServer) -> None:
    response = create(server, say("Hello."))
    assert get(server, response["id"]) == response
    gone = server.http.delete(f"{PATH}/{response['id']}").json()
    assert gone == {"id": response["id"], "object": "response", "deleted": True}
    for answer in (
        server.http.get(f"{PATH}/{response['id']}"),
        server.http.delete(f"{PATH}/{response['id']}"),
        server.http.post(f"{PATH}/{response['id']}/cancel"),
        server.http.get(f"{PATH}/{response['id']}/input_items"),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "response_id"
    error = error_of(server, {"input": "hi", "previous_response_id": response["id"]})
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def test_a_streamed_response_is_kept(server: RunningServer) -> None:
    last = named_events(server.post(PATH, {"input": say("Hello."), "stream": True}))[-1]
    assert get(server, last["response"]["id"]) == last["response"]


def test_what_need_not_be_kept_is_not(server: RunningServer) -> None:
    response = create(server, "hi", store=False)
    assert server.http.get(f"{PATH}/{response['id']}").status_code == 404


def test_those_used_last_are_kept(start_server: StartServer) -> None:
    server = start_server(max_stored_responses=2)
    first, second = create(server, "one"), create(server, "two")
    get(server, first["id"])
    third = create(server, "three", previous_response_id=second["id"])
    fourth = create(server, "four")
    kept = [server.http.get(f"{PATH}/{r['id']}").status_code for r in (first, second, third, fourth)]
    assert kept == [404, 404, 200, 200]
    assert text_of(create(server, "go on", previous_response_id=third["id"])) == "ok"  # with what it stood on
    assert "<user>two<assistant>ok<user>three" in prompt_of(server)


MOST = 30_000  # room for two


def test_the_store_is_bounded_in_bytes_but_keeps_what_runs(server: RunningServer) -> None:
    def stored(name: str, **fields: Any) -> StoredResponse:
        response = msgspec.convert({**create(server, "hi"), "id": f"resp_{name}", **fields}, Response)
        return StoredResponse(response, (), 1000)

    async def kept(names: str) -> str:
        return "".join([name for name in names if await store.get(f"resp_{name}")])

    async def fill() -> None:
        running = stored("r", status="queued")
        await store.add(running)
        assert running.size * 2 < MOST < running.size * 3
        for name in "abc":
            await store.add(stored(name))
        assert await kept("rabc") == "rc"
        ended = await store.get("resp_r")
        assert ended is not None
        ended.response.status = "completed"
        await store.add(ended)  # the newest now
        await store.add(stored("d"))
        assert await kept("rcd") == "rd"
        await store.remove("resp_d")
        await store.add(stored("e"))
        assert await kept("re") == "re"
        await store.add(stored("h", metadata={"x": "y" * 40_000}))
        assert await kept("reh") == ""

    store = ResponseStore(5, max_bytes=MOST)
    asyncio.run(fill())


@pytest.mark.parametrize(
    "one",
    [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 3},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x" * 3000},
        {"role": "user", "content": "wide \U0001f30a" + "x" * 3000},
    ],
    ids=range(5),
)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_what_responses_take_in_memory_is_estimated(one: dict[str, Any], ascii_only: bool) -> None:
    raw = json.dumps({"input": [one] * 500}, ensure_ascii=ascii_only).encode()
    decode = BodyDecoder(ResponsesRequest, prepare_body, notes=ParameterNotes())
    decode(raw)
    tracemalloc.start()
    try:
        body = decode(raw)
        assert isinstance(body.input, list)
        for item in body.input:
            item.id = new_item_id(type(item))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 1.2 * held_bytes(raw) < 5 * taken


def test_a_server_that_keeps_nothing_says_so(start_server: StartServer) -> None:
    server = start_server(max_stored_responses=0)
    assert create(server, "hi")["store"] is False
    for name, value in (("store", True), ("background", True), ("previous_response_id", "resp_0")):
        error = error_of(server, {"input": "hi", name: value})
        assert error["param"] == name
        assert "--max-stored-responses" in error["message"]


def test_input_items_come_in_pages(server: RunningServer) -> None:
    response = create(server, [message(f"m{i}") for i in range(5)])
    path = f"{response['id']}/input_items"
    newest = get(server, path, limit=2)
    assert [item["content"] for item in newest["data"]] == [
        [{"type": "input_text", "text": "m4"}],
        [{"type": "input_text", "text": "m3"}],
    ]
    assert (newest["object"], newest["has_more"]) == ("list", True)
    assert (newest["first_id"], newest["last_id"]) == tuple(item["id"] for item in newest["data"])
    rest = get(server, path, after=newest["last_id"])
    assert [item["content"][0]["text"] for item in rest["data"]] == ["m2", "m1", "m0"]
    assert rest["has_more"] is False
    for params in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "msg_0"}, {"include[]": "x"}):
        answer = server.http.get(f"{PATH}/{path}", params=params)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(params)).removesuffix("[]"))


# In the background.


@pytest.fixture(scope="module")
def slow(start_server: StartServer) -> RunningServer:
    return start_server(engine={"step_s": 0.005})


def ended(server: RunningServer, response_id: str) -> Any:
    deadline = time.monotonic() + 20
    while (response := get(server, response_id))["status"] in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return response


def wait_until_idle(server: RunningServer) -> None:
    deadline = time.monotonic() + 20
    while server.engine.stats().num_running or server.engine.stats().num_waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_response_goes_on_in_the_background(slow: RunningServer) -> None:
    response = create(slow, say("Hello."), background=True)
    assert (response["status"], response["background"], response["output"]) == ("queued", True, [])
    response = ended(slow, response["id"])
    assert (response["status"], text_of(response)) == ("completed", "Hello.")
    assert slow.post(f"{PATH}/{response['id']}/cancel", {}).json() == response
    assert text_of(create(slow, say("Bye."), previous_response_id=response["id"])) == "Bye."


def test_a_background_response_is_cancelled(slow: RunningServer) -> None:
    response = create(slow, "LOOP(", background=True)
    error = error_of(slow, {"input": "hi", "previous_response_id": response["id"]})
    assert error["param"] == "previous_response_id"
    cancelled = slow.post(f"{PATH}/{response['id']}/cancel", {}).json()
    assert (cancelled["id"], cancelled["status"]) == (response["id"], "cancelled")
    assert get(slow, response["id"])["status"] == "cancelled"
    assert slow.post(f"{PATH}/{response['id']}/cancel", {}).json()["status"] == "cancelled"
    wait_until_idle(slow)
    assert error_of(slow, {"input": "hi", "previous_response_id": response["id"]})["param"] == "previous_response_id"


def test_deleting_a_background_response_ends_it(slow: RunningServer) -> None:
    response = create(slow, "LOOP(", background=True)
    assert slow.http.delete(f"{PATH}/{response['id']}").json()["deleted"] is True
    wait_until_idle(slow)
    assert slow.http.get(f"{PATH}/{response['id']}").status_code == 404


def test_only_background_responses_are_cancelled(server: RunningServer) -> None:
    response = create(server, "hi")
    assert "background" in error_of(server, {}, f"{PATH}/{response['id']}/cancel")["message"]


def test_a_background_response_may_fail(slow: RunningServer) -> None:
    response = ended(slow, create(slow, "BREAK(", background=True)["id"])
    assert response["status"] == "failed"
    assert "cannot be turned into text" in response["error"]["message"]


def test_a_background_stream_outlives_its_reader(slow: RunningServer) -> None:
    body = {"input": say("Hello, all of you."), "background": True, "stream": True}
    with slow.http.stream("POST", PATH, json=body) as stream:
        lines = stream.iter_lines()
        first = json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))
    path = f"{PATH}/{first['response']['id']}"
    received = named_events(slow.http.get(path, params={"stream": "true"}))
    assert [event["type"] for event in received[:3]] == [
        "response.created", "response.queued", "response.in_progress",
    ]  # fmt: skip
    assert received[0] == first
    assert received[-1]["type"] == "response.completed"
    assert text_of(received[-1]["response"]) == "Hello, all of you."
    assert get(slow, first["response"]["id"]) == received[-1]["response"]
    rest = named_events(slow.http.get(path, params={"stream": "true", "starting_after": 4}))
    assert rest == received[5:]


def test_cancelling_ends_the_streams(slow: RunningServer) -> None:
    with slow.http.stream("POST", PATH, json={"input": "LOOP(", "background": True, "stream": True}) as stream:
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: "))
        response_id = json.loads(next(lines))["response"]["id"]
        canceller = threading.Thread(target=lambda: slow.post(f"{PATH}/{response_id}/cancel", {}))
        canceller.start()
        kinds = {json.loads(line)["type"] for line in lines}
        canceller.join()
    assert not kinds & {"response.completed", "response.failed"}


def test_only_background_streams_are_streamed_again(server: RunningServer) -> None:
    response = create(server, "hi")
    for params in ({"stream": "true"}, {"include_obfuscation": "true"}, {"include": "x"}):
        answer = server.http.get(f"{PATH}/{response['id']}", params=params)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(params)))


# Tools that are no functions.

PATCH = """
start: "*** Begin" LF line+ "*** End"
line: ("+" | "-") /(.*)/ LF
%import common.LF
"""
TEXT: dict[str, Any] = {"type": "custom", "name": "say", "description": "Says it."}
EDIT: dict[str, Any] = {**TEXT, "name": "edit", "format": {"type": "grammar", "syntax": "lark", "definition": PATCH}}
CITY = {"type": "namespace", "name": "city", "description": "Cities.", "tools": [ADD, TEXT]}


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_namespaces_and_custom_tools(server: RunningServer) -> None:
    given = 'two\nlines, "quoted" \\ 🦩'
    calls = call_of("city__add", a=1), call_of("city__say", input=given), call_of("edit", input="x"), CALL
    body: dict[str, Any] = {"tools": [ADD, CITY, EDIT], "input": say("\n".join(calls)), "max_output_tokens": 900}
    for _ in range(20):  # tokens that are ready together share a delta, and many are where a core must be waited for
        received = named_events(server.post(PATH, {**body, "stream": True}))
        deltas = [e["delta"] for e in received if e["type"] == "response.custom_tool_call_input.delta"]
        if len(deltas) > 10:
            break
    assert len(deltas) > 10
    whole = server.post(PATH, body).json()["output"]
    assert without_ids(received[-1]["response"]["output"]) == without_ids(whole)
    assert [(item["type"], item["name"], item.get("namespace")) for item in whole] == [
        ("function_call", "add", "city"),
        ("custom_tool_call", "say", "city"),
        ("custom_tool_call", "edit", None),
        ("function_call", "add", None),
    ]
    assert whole[1]["input"] == given
    assert "".join(deltas) == given + "x"
    (first, _) = [e for e in received if e["type"] == "response.custom_tool_call_input.done"]
    assert (first["input"], first["output_index"]) == (given, 1)
    results = [
        {"type": "function_call_output", "call_id": whole[0]["call_id"], "output": [
            {"type": "input_image", "image_url": "data:"}]},
        {"type": "custom_tool_call_output", "call_id": whole[1]["call_id"], "output": "said"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    ]  # fmt: skip
    create(server, [message("Hi."), *whole[:2], *results, message("ok")], tools=[ADD, CITY, EDIT])
    prompt = prompt_of(server)
    assert (
        f"[city__add {whole[0]['arguments']}][city__say {json.dumps({'input': given}, ensure_ascii=False)}]" in prompt
    )
    assert f"[tool {whole[0]['call_id']}]<tool>[An image, which this model cannot see.]" in prompt
    assert "<tool>said<user>ok[" in prompt


def test_the_model_is_told_what_a_custom_tool_takes(start_server: StartServer) -> None:
    server = start_server(engine={"template": "{{ [tools, messages] | tojson }}"}, tool_call_parser="hermes")
    create(server, "hi", tools=[{"type": "web_search"}, EDIT, {**ADD, "defer_loading": True}, {"type": "tool_search"}])
    tools, _ = json.loads(prompt_of(server))
    edit, add = (tool["function"] for tool in tools)
    assert (edit["name"], add["name"]) == ("edit", "add")
    assert edit["description"].endswith(PATCH.rstrip())
    pattern = edit["parameters"]["properties"]["input"]["pattern"]
    assert re.search(pattern, "*** Begin\n+a\n-\n*** End")
    assert not re.search(pattern, "*** Begin\na\n*** End")


@pytest.mark.parametrize("named", [{"name": "edit"}, {"name": "edit", "namespace": "files"}, {"name": "files__edit"}])
def test_a_demanded_custom_tool_gets_text_of_its_grammar(demo_server: ServerProcess, named: Any) -> None:
    pytest.importorskip("llguidance")  # not there on every machine
    short = PATCH.replace("/(.*)/", "/[a-z]{0,4}/").replace("line+", "line~1..2")
    edit = {**EDIT, "format": {**EDIT["format"], "definition": short}}
    tools = [{"type": "namespace", "name": "files", "tools": [edit]}]
    body = {"input": "Write a poem.", "tools": tools, "tool_choice": {"type": "custom", **named}, "temperature": 0.5}
    answer = httpx.post(f"{demo_server.url}{PATH}", json=body, trust_env=False).json()
    call = answer["output"][-1]
    assert (call["type"], call["name"], call["namespace"]) == ("custom_tool_call", "edit", "files")
    assert re.fullmatch(r"\*\*\* Begin\n([-+][a-z]{0,4}\n){1,2}\*\*\* End", call["input"])


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"input": "a\\u00fc\\ud83e\\udda9\\n"}', "aü🦩\n"),
        ('{"input": "a\nb', "a\nb"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "no \\d escape here", "more": 1}', 'no \\d escape here", "more": 1}'),
        ('{"other": 1}', '{"other": 1}'),
        ('{"other": 1, "input": "a"}', "a"),
        ("", ""),
    ],
)
def test_what_models_write_for_a_custom_tool(arguments: str, given: str) -> None:
    for size in (1, 3, 100):
        decoding = CustomInput()
        parts = [decoding.feed(arguments[i : i + size]) for i in range(0, len(arguments), size)]
        parts.append(decoding.finish())
        assert "".join(parts) == decoding.text == given


# What is refused.

HI = {"input": "hi"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{"content": "a"}]}, "input[0].role"),
    ({"input": [message("a", "wizard")]}, "input[0].role"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "?"}, message("a")]},
     "input[0].encrypted_content"),
    ({"input": "a" * 9000}, "input"),
    ({**HI, "max_output_tokens": 0}, "max_output_tokens"),
    ({**HI, "max_tokens": 5}, "max_tokens"),
    ({**HI, "temperature": -1}, "temperature"),
    ({**HI, "top_logprobs": 21}, "top_logprobs"),
    ({**HI, "include": ["file_search_call.results"]}, "include"),
    ({**HI, "tools": [{"type": "computer_use_preview"}]}, "tools[0].type"),
    ({**HI, "tools": [{"type": "custom", "name": "x y"}]}, "tools[0].name"),
    ({**HI, "tools": [{"type": "namespace", "name": "n", "tools": [{**ADD, "name": ""}]}]}, "tools[0].tools[0].name"),
    ({**HI, "tools": [ADD, ADD]}, "tools[1].name"),
    ({**HI, "tools": [{"type": "custom", "name": "x", "format": {
        "type": "grammar", "syntax": "lark", "definition": "start: start"}}]}, "tools[0].format.definition"),
    ({**HI, "tools": [{**EDIT, "format": {"type": "grammar", "syntax": "regex", "definition": "a" * 16385}}]},
     "tools[0].format.definition"),
    ({**HI, "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({**HI, "tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({**HI, "tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "web_search"}]}}, "tool_choice.tools"),
    ({**HI, "tools": [{**ADD, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
    ({**HI, "tools": [{**ADD, "async": True}]}, "tools[0].async"),
    ({**HI, "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({**HI, "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice"),
    ({**HI, "tool_choice": {"type": "function", "name": "x"}, "tools": [ADD]}, "tool_choice"),
    ({**HI, "tool_choice": "required"}, "tool_choice"),
    ({**HI, "text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({**HI, "reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({**HI, "reasoning": {"context": "all_turns"}}, "reasoning.context"),
    ({**HI, "reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({**HI, "background": True, "store": False}, "background"),
    ({**HI, "stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({**HI, "conversation": "conv_1"}, "conversation"),
    ({**HI, "prompt": {"id": "p"}}, "prompt"),
    ({**HI, "moderation": {"model": "m"}}, "moderation"),
    ({**HI, "context_management": [{"type": "compaction"}]}, "context_management"),
    ({**HI, "background_options": {}}, "background_options"),
    ({**HI, "truncation": "middle"}, "truncation"),
    ({**HI, "metadata": {"a": 1}}, "metadata[...]"),
    ({**HI, "previous_response_id": "resp_0"}, "previous_response_id"),
    ({**HI, "response_format": {"type": "json_object"}}, "response_format"),
    ({**HI, "n": 2}, "n"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(server: RunningServer, body: Any, param: str) -> None:
    error = error_of(server, body)
    assert error["param"] == param
    assert param.split(".")[0].split("[")[0] in error["message"]
    assert error["type"] == "invalid_request_error"


def test_bodies_that_are_no_requests(server: RunningServer) -> None:
    for raw in (b"", b"{", b"[]", b"\xff", b'"a"', b"[" * 5000, b'{"input": "\\ud800"}', b'{"input": NaN}'):
        assert server.http.post(PATH, content=raw).status_code == 400, raw
    huge = {**HI, "tools": [{**ADD, "parameters": {"maximum": 10**30}}]}
    assert server.post(PATH, huge).status_code == 200
    compact = server.post(f"{PATH}/compact", {})
    assert compact.status_code == 404
    assert '"truncation": "auto"' in compact.json()["error"]["message"]


def test_a_model_that_is_not_served(server: RunningServer) -> None:
    response = server.post(PATH, {**HI, "model": "gpt-5"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_vllms_extras_reach_the_engine(server: RunningServer) -> None:
    create(server, "hi", top_k=3, min_p=0.5, seed=4, stop=["x"], repetition_penalty=1.5, ignore_eos=False)
    sampling = server.engine.requests[-1].sampling
    assert (sampling.top_k, sampling.min_p, sampling.seed, sampling.stop) == (3, 0.5, 4, ("x",))
    assert sampling.repetition_penalty == 1.5
