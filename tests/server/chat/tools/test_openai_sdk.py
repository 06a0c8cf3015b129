"""The openai SDK's streaming helper, tools and `parse`, on answers that are known."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from server.conftest import RunningServer, StartServer

CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
ARGUMENTS = {"city": "Köln", "days": 2}


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str
    days: int


TOOLS: Any = [openai.pydantic_function_tool(Weather)]


def ask(text: str) -> Any:
    return {"model": "scripted", "messages": [{"role": "user", "content": f"SAY({text})YAS"}]}


def test_the_streaming_helper_puts_calls_together(client: openai.OpenAI) -> None:
    body = ask(f"<think>hm</think>One moment.\n{CALL}\n{CALL}")
    with client.chat.completions.stream(**body, tools=TOOLS) as stream:
        fragments = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta" and event.index == 1
        ]
        completion = stream.get_final_completion()
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    calls = choice.message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [Weather(city="Köln", days=2)] * 2
    assert len({call.id for call in calls}) == 2
    assert json.loads("".join(fragments)) == ARGUMENTS


def test_arguments_arrive_in_pieces(start_server: StartServer) -> None:
    slow = start_server(engine={"step_s": 0.002}, tool_call_parser="hermes")
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as sdk:
        stream = sdk.chat.completions.create(**ask(CALL), tools=TOOLS, stream=True)
        deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    first, *rest = deltas
    assert first.function is not None
    assert (first.index, first.type, first.function.name, first.function.arguments) == (0, "function", "Weather", "")
    assert first.id
    assert len(rest) > 2
    assert all(delta.id is None and delta.function and delta.function.name is None for delta in rest)
    joined = "".join(delta.function.arguments or "" for delta in rest if delta.function)
    assert json.loads(joined) == ARGUMENTS


def test_a_conversation_with_tools(client: openai.OpenAI, parsing_server: RunningServer) -> None:
    body = ask(CALL)
    message = client.chat.completions.create(**body, tools=TOOLS).choices[0].message
    assert message.tool_calls
    (call,) = message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny. SAY(It is sunny.)YAS"}
    body["messages"] += [message, result]
    assert client.chat.completions.create(**body, tools=TOOLS).choices[0].message.content == "It is sunny."
    prompt = parsing_server.engine.tokenizer.decode(list(parsing_server.engine.requests[-1].prompt_token_ids))
    assert f'[Weather {{"city": "Köln", "days": 2}}][tool {call.id}]<tool>sunny.' in prompt


def test_parse_reads_calls_and_takes_its_message_back(client: openai.OpenAI) -> None:
    body = ask(CALL)
    message = client.chat.completions.parse(**body, tools=TOOLS).choices[0].message
    assert message.tool_calls
    assert message.tool_calls[0].function.parsed_arguments == Weather(city="Köln", days=2)
    body["messages"] += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "SAY(ok)YAS"}]
    assert client.chat.completions.create(**body).choices[0].message.content == "ok"


def test_reasoning_streamed_and_whole(client: openai.OpenAI) -> None:
    body = ask("<think>\nhm hm\n</think>\nFour.")
    whole = client.chat.completions.create(**body)
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm hm", "Four.")
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("<think>\nhm hm\n</think>")
    deltas: list[Any] = [chunk.choices[0].delta for chunk in client.chat.completions.create(**body, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm hm"
    assert "".join(delta.content or "" for delta in deltas) == "Four."


def test_a_stream_that_breaks_raises(client: openai.OpenAI) -> None:
    body: Any = {"model": "scripted", "messages": [{"role": "user", "content": "BREAK("}]}
    with pytest.raises(openai.APIError, match="cannot be turned into text"):
        list(client.chat.completions.create(**body, stream=True))
