"""The openai SDK's `responses`, on answers that are known and on the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from server.conftest import ServerProcess

CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
ARGUMENTS = {"city": "Köln", "days": 2}


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str
    days: int


SHORT: Any = {
    "type": "function", "name": "Weather", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"enum": [1, 2]}},
                   "required": ["city", "days"], "additionalProperties": False},
}  # fmt: skip
COMPUTER: Any = {"type": "computer_use_preview", "display_width": 640, "display_height": 480, "environment": "linux"}
TOOLS: Any = [
    {"type": "function", "name": "Weather", "parameters": Weather.model_json_schema(), "strict": False},
]


@pytest.fixture(scope="module")
def demo(demo_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def ask(text: str) -> Any:
    return {"model": "scripted", "input": f"SAY({text})YAS"}


def test_create(client: openai.OpenAI) -> None:
    response = client.responses.create(**ask("<think>hm hm</think>Four."), instructions="Be brief.")
    assert response.output_text == "Four."
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["hm hm"]
    assert (message.type, message.status) == ("message", "completed")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len("<think>hm hm</think>")


def test_the_streaming_helper_puts_a_response_together(client: openai.OpenAI) -> None:
    with client.responses.stream(**ask(f"<think>hm</think>One moment.\n{CALL}\n{CALL}"), tools=TOOLS) as stream:
        received = list(stream)
        response = stream.get_final_response()
    texts = [event.delta for event in received if event.type == "response.output_text.delta"]
    assert "".join(texts) == response.output_text == "One moment."
    snapshots = [event.snapshot for event in received if event.type == "response.function_call_arguments.delta"]
    calls: list[Any] = [item for item in response.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [ARGUMENTS] * 2
    assert snapshots[-1] == calls[1].arguments
    assert len({call.call_id for call in calls}) == 2


def test_plain_streams(client: openai.OpenAI) -> None:
    stream = client.responses.create(**ask("<think>hm</think>Four."), stream=True)
    thoughts, texts, last = "", "", None
    for event in stream:
        if event.type == "response.reasoning_text.delta":
            thoughts += event.delta
        elif event.type == "response.output_text.delta":
            texts += event.delta
        last = event
    assert (thoughts, texts) == ("hm", "Four.")
    assert last is not None
    assert last.type == "response.completed"
    assert last.response.output_text == "Four."


def test_a_conversation_with_tools_that_the_client_keeps(client: openai.OpenAI) -> None:
    conversation: Any = [{"role": "user", "content": f"SAY({CALL})YAS"}]
    response = client.responses.create(model="scripted", input=conversation, tools=TOOLS, store=False)
    (call,) = response.output
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny. SAY(It is sunny.)YAS"}
    conversation += [*response.output, result]
    response = client.responses.create(model="scripted", input=conversation, tools=TOOLS, store=False)
    assert response.output_text == "It is sunny."


def test_a_conversation_with_tools_that_the_server_keeps(client: openai.OpenAI) -> None:
    first = client.responses.create(**ask(CALL), tools=TOOLS)
    (call,) = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny. SAY(It is sunny.)YAS"}
    second = client.responses.create(model="scripted", input=[result], previous_response_id=first.id, tools=TOOLS)
    assert second.output_text == "It is sunny."
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(second.id) == second
    items = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    third = client.responses.create(**ask("Bye."), previous_response_id=second.id)
    assert third.output_text == "Bye."


def test_background(client: openai.OpenAI) -> None:
    response = client.responses.create(model="scripted", input="LOOP(", background=True)
    assert response.status == "queued"
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.retrieve(response.id).status == "cancelled"
    stream = client.responses.create(**ask("Four."), background=True, stream=True)
    created = next(iter(stream))
    assert created.type == "response.created"
    stream.close()
    again = list(client.responses.retrieve(created.response.id, stream=True, starting_after=0))
    assert [event.sequence_number for event in again] == list(range(1, len(again) + 1))
    assert again[-1].type == "response.completed"


def test_input_tokens(client: openai.OpenAI) -> None:
    count = client.responses.input_tokens.count(model="scripted", input="Hi.", instructions="Be brief.")
    response = client.responses.create(model="scripted", input="Hi.", instructions="Be brief.")
    assert response.usage is not None
    assert count.input_tokens == response.usage.input_tokens


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="computer_use_preview") as info:
        client.responses.create(**ask("hi"), tools=[COMPUTER])
    assert info.value.param == "tools[0].type"
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.responses.create(model="gpt-5", input="hi")
    broken = list(client.responses.create(model="scripted", input="BREAK(", stream=True))
    assert broken[-1].type == "response.failed"
    assert broken[-1].response.error is not None
    assert broken[-1].response.error.code == "server_error"


def test_the_embedded_model_answers(demo: openai.OpenAI) -> None:
    body: Any = {"model": "tidewheel-demo", "input": "Who are you?", "temperature": 0}
    response = demo.responses.create(**body)
    assert "tidewheel" in response.output_text.lower()
    with demo.responses.stream(**body) as stream:
        assert stream.get_final_response().output_text == response.output_text
    chat = demo.chat.completions.create(
        model="tidewheel-demo", temperature=0, messages=[{"role": "user", "content": "Who are you?"}]
    )
    assert chat.choices[0].message.content == response.output_text


def test_the_embedded_model_calls_a_tool(demo: openai.OpenAI) -> None:
    weather: Any = {
        "type": "function", "name": "get_weather", "description": "Get the weather of a city", "strict": None,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }  # fmt: skip
    body: Any = {"model": "tidewheel-demo", "tools": [weather], "temperature": 0}
    first = demo.responses.create(**body, input="What is the weather in Paris?")
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"weather": "sunny"}'}
    second = demo.responses.create(**body, input=[result], previous_response_id=first.id)
    assert second.output_text


class Mill(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    grinds: bool | None


def test_the_embedded_model_is_parsed(demo: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    body: Any = {"model": "tidewheel-demo", "input": "Invent a mill.", "temperature": 0.7, "extra_body": {"seed": 1}}
    response = demo.responses.parse(**body, text_format=Mill)
    assert isinstance(response.output_parsed, Mill)
    with demo.responses.stream(**body, text_format=Mill) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed
    again = [{"role": "user", "content": "Invent a mill."}, *response.output, {"role": "user", "content": "Thanks."}]
    assert demo.responses.create(model="tidewheel-demo", input=again).status == "completed"
    as_object = demo.responses.create(**body, text={"format": {"type": "json_object"}})
    assert isinstance(json.loads(as_object.output_text), dict)
    with pytest.raises(openai.BadRequestError) as info:
        demo.responses.create(**body, text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "mill"}}})
    assert info.value.param == "text.format.schema"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "Weather"}])
def test_the_embedded_model_must_call(demo: openai.OpenAI, choice: Any) -> None:
    pytest.importorskip("llguidance")
    response = demo.responses.create(
        model="tidewheel-demo", input="Hi.", tools=[SHORT], tool_choice=choice, parallel_tool_calls=False,
        temperature=0,
    )  # fmt: skip
    (call,) = response.output
    assert call.type == "function_call"
    assert call.name == "Weather"
    Weather.model_validate_json(call.arguments)
