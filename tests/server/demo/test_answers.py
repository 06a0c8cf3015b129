"""`tidewheel serve` without a model: what a new user meets first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server.conftest import ServerProcess

from tidewheel.server.options.serve import parse_options

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def client(demo_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def ask(client: openai.OpenAI, text: str, **options: Any) -> str:
    messages: Any = [{"role": "user", "content": text}]
    model = client.models.list().data[0].id
    completion = client.chat.completions.create(model=model, messages=messages, temperature=0, **options)
    return completion.choices[0].message.content or ""


def test_it_knows_who_it_is_and_how_it_is_used(client: openai.OpenAI) -> None:
    assert client.models.list().data[0].id == "tidewheel-demo"
    assert "tidewheel" in ask(client, "Who are you?").lower()
    assert "tidewheel serve" in ask(client, "How do I start the server?")


def test_its_weights_are_quantized_unless_somebody_says_how_they_are_stored(demo_server: ServerProcess) -> None:
    engine = httpx.get(f"{demo_server.url}/server_info", trust_env=False).json()["engine"]
    assert (engine["dtype"], engine["quantization"]) in {(dtype, "int8-channel") for dtype in ("bfloat16", "float32")}
    for arguments, quantization in {
        (): "int8-channel",
        ("--quantization", "int4"): "int4",
        ("--dtype", "bfloat16"): None,
        ("--dtype", "float32", "--quantization", "int8"): "int8",
        ("--device", "torch"): None,
        ("another/model",): None,
    }.items():
        assert parse_options(arguments).engine.quantization == quantization


def test_it_streams(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Who are you?"}]
    stream = client.chat.completions.create(model="tidewheel-demo", messages=messages, temperature=0, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == ask(client, "Who are you?")
    assert len([piece for piece in pieces if piece]) > 1


def test_it_calls_a_tool(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = client.chat.completions.create(
        model="tidewheel-demo", messages=messages, tools=[WEATHER], temperature=0
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    call: Any = choice.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_a_forced_call_of_a_function_without_parameters_has_no_arguments(demo_server: ServerProcess) -> None:
    pytest.importorskip("llguidance")
    ask: Any = {"temperature": 1.2, "seed": 1, "parallel_tool_calls": False}
    messages = [{"role": "user", "content": "What is the time in Paris?"}]
    with httpx.Client(base_url=demo_server.url, timeout=60, trust_env=False) as http:
        for parameters in ({}, {"parameters": None}, {"parameters": {}}, {"parameters": {"properties": {}}}):
            tool = {"name": "get_time", "description": "Get the time", **parameters}
            for chosen in ("required", {"type": "function", "function": {"name": "get_time"}}):
                tools = [{"type": "function", "function": tool}]
                body = {"messages": messages, "tools": tools, "tool_choice": chosen, "n": 8, "max_tokens": 200, **ask}
                choices = http.post("/v1/chat/completions", json=body).json()["choices"]
                assert {c["function"]["arguments"] for o in choices for c in o["message"]["tool_calls"]} == {"{}"}
            body = {"input": "What is the time?", "tools": [{"type": "function", **tool}], "tool_choice": "required"}
            items = http.post("/v1/responses", json={**body, "max_output_tokens": 200, **ask}).json()["output"]
            assert {item["arguments"] for item in items} == {"{}"}
        anthropic = [{"name": "get_time", "input_schema": {"type": "object"}}]
        for forced in ({"type": "any"}, {"type": "tool", "name": "get_time"}):
            choice = {**forced, "disable_parallel_tool_use": True}
            body = {"messages": messages, "tools": anthropic, "tool_choice": choice, "max_tokens": 200}
            blocks = http.post("/v1/messages", json={**body, "temperature": 1.0}).json()["content"]
            assert [block["input"] for block in blocks] == [{}]


def test_calls_are_found_by_the_chat_template(demo_server: ServerProcess) -> None:
    info = httpx.get(f"{demo_server.url}/server_info", trust_env=False).json()
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("hermes", None)
