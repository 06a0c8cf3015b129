"""The `openai` package of npm over real sockets: on answers that are known, and on the embedded model."""

from __future__ import annotations

import json
from typing import Any

import encoder_zoo as zoo
import numpy as np
import pytest
from clients.conftest import RunScenario, say, until_idle
from server.conftest import RunningServer, ServerProcess

CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
ARGUMENTS = {"city": "Köln", "days": 2}


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": say(text), **fields}


def test_chat(run_node: RunScenario, scripted: RunningServer) -> None:
    got = run_node("chat", scripted.url, **ask("hello, wörld 潮", logprobs=True, top_logprobs=2, n=2))
    assert got["status"] == 200
    assert got["requestId"]
    for choice in got["completion"]["choices"]:
        assert choice["message"]["content"] == "hello, wörld 潮"
        assert choice["finish_reason"] == "stop"
        assert {len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]} == {2}


def test_stream(run_node: RunScenario, scripted: RunningServer) -> None:
    got = run_node("stream", scripted.url, **ask("hello, wörld 潮"))
    assert got["text"] == "hello, wörld 潮"
    assert got["usage"]["completion_tokens"] == len("hello, wörld 潮".encode()) + 1


def test_the_streaming_helper_puts_calls_together(run_node: RunScenario, scripted: RunningServer) -> None:
    got = run_node("streamHelper", scripted.url, **ask(f"<think>hm</think>One moment.\n{CALL}\n{CALL}"))
    assert got["text"] == got["choice"]["message"]["content"] == "One moment."
    assert got["calls"] == [[0, "Weather", ARGUMENTS], [1, "Weather", ARGUMENTS]]
    assert got["choice"]["finish_reason"] == "tool_calls"
    assert len({call["id"] for call in got["choice"]["message"]["tool_calls"]}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tools(run_node: RunScenario, scripted: RunningServer, stream: bool) -> None:
    got = run_node("runTools", scripted.url, body=ask(CALL, stream=stream), result="SAY(It is sunny.)YAS")
    assert got["asked"] == [ARGUMENTS]
    assert got["content"] == "It is sunny."
    assert got["roles"] == ["user", "assistant", "tool", "assistant"]


def test_parse_reads_calls(run_node: RunScenario, scripted: RunningServer) -> None:
    assert run_node("parseTools", scripted.url, **ask(CALL)) == [ARGUMENTS]


def test_parse_reads_structured_output(run_node: RunScenario, demo_server: ServerProcess) -> None:
    pytest.importorskip("llguidance")  # not there on every machine
    messages = [{"role": "user", "content": "Invent a mill."}]
    whole, streamed, plain = run_node(
        "parse", demo_server.url, model="tidewheel-demo", messages=messages, temperature=0.7, seed=1
    )
    assert whole == streamed == plain  # the scenario has validated them


def test_responses(run_node: RunScenario, scripted: RunningServer) -> None:
    asked = f"SAY(<think>hm</think>One moment.\n{CALL})YAS"
    got = run_node("responses", scripted.url, model="scripted", input=asked)
    assert got["whole"] == got["retrieved"] == got["text"] == "One moment."
    assert got["status"] == "completed"
    assert [item["type"] for item in got["output"]] == ["reasoning", "message", "function_call"]
    assert json.loads(got["output"][-1]["arguments"]) == ARGUMENTS
    assert {"response.created", "response.function_call_arguments.done", "response.completed"} <= set(got["types"])


def test_completions(run_node: RunScenario, scripted: RunningServer) -> None:
    got = run_node("completions", scripted.url, model="scripted", prompt=["SAY(one)YAS", "SAY(two)YAS"])
    assert got == {"whole": ["one", "two"], "streamed": ["one", "two"]}


def test_models(run_node: RunScenario, scripted: RunningServer) -> None:
    assert run_node("models", scripted.url) == {"ids": ["scripted", "embed"], "retrieved": "scripted"}


def test_embeddings(run_node: RunScenario, scripted: RunningServer) -> None:
    texts = zoo.texts(5)
    by_default, as_floats = run_node("embeddings", scripted.url, model="embed", input=texts)
    np.testing.assert_allclose(as_floats, zoo.reference("bert", texts), rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(np.float32(by_default), np.float32(as_floats))  # base64, which the package asks for


def test_errors_are_typed(run_node: RunScenario, scripted: RunningServer) -> None:
    broken = {"model": "scripted", "messages": [{"role": "user", "content": "BREAK("}]}
    got = run_node("errors", scripted.url, body=ask("hi"), broken=broken)
    assert all(error["isApiError"] for error in got.values())
    fields = {name: [error.get(key) for key in ("name", "status", "code", "param")] for name, error in got.items()}
    assert fields["unknownModel"] == ["NotFoundError", 404, "model_not_found", "model"]
    assert fields["badParameter"][:2] == ["BadRequestError", 400]
    assert fields["badParameter"][3] == "temperature"
    assert fields["badParameterOfAStream"][3] == "top_p"
    assert fields["badKey"] == ["AuthenticationError", 401, "invalid_api_key", None]
    for name in ("brokenStream", "brokenHelper"):
        assert "cannot be turned into text" in got[name]["message"]


def test_clients_that_leave_free_the_engine(run_node: RunScenario, slow: RunningServer) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "LOOP("}]}
    got = run_node("abort", slow.url, **body)
    assert got["helper"]["name"] == "APIUserAbortError"
    assert got["timeout"]["name"] == "APIConnectionTimeoutError"
    until_idle(slow)
