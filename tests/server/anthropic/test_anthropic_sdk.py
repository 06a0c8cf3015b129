"""The anthropic SDK, on answers that are known and on the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pydantic
import pytest
from server.conftest import RunningServer, ServerProcess

if TYPE_CHECKING:
    import anthropic

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def client(parsing_server: RunningServer) -> Iterator[anthropic.Anthropic]:
    import anthropic  # which takes a second

    with anthropic.Anthropic(base_url=parsing_server.url, api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def demo(demo_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=demo_server.url, api_key="none", max_retries=0) as sdk:
        yield sdk


def ask(text: str) -> Any:
    return {"model": "scripted", "max_tokens": 400, "messages": [{"role": "user", "content": f"SAY({text})YAS"}]}


def test_create(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ask("<think>hm hm</think>Four."), system="Be brief.")
    thinking, text = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "hm hm"
    assert text.type == "text"
    assert text.text == "Four."
    assert (message.stop_reason, message.role) == ("end_turn", "assistant")
    assert message._request_id
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens == len("<think>hm hm</think>")


def test_an_agent_goes_on(client: anthropic.Anthropic) -> None:
    """As Claude Code asks: beta headers, caches asked for, context management, its own message sent back."""
    more: Any = {
        "betas": ["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "someone"},
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{**WEATHER, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
    }
    asked = ask(f"<think>hm</think>One moment.\n{CALL}")
    first = client.beta.messages.create(**asked, **more)
    call = first.content[-1]
    assert call.type == "tool_use"
    result = {
        "type": "tool_result", "tool_use_id": call.id, "is_error": False, "cache_control": {"type": "ephemeral"},
        "content": [{"type": "text", "text": "SAY(Rain.)YAS", "citations": None}],
    }  # fmt: skip
    turns = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with client.beta.messages.stream(**{**asked, "messages": [*asked["messages"], *turns]}, **more) as stream:
        said = stream.get_final_message().content[-1]
    assert said.type == "text"
    assert said.text == "Rain."


def test_the_streaming_helper_puts_a_message_together(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ask(f"<think>hm</think>One moment.\n{CALL}"), tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json", "message_stop"} <= set(kinds)
    thinking, text, call = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "hm"
    assert text.type == "text"
    assert text.text == "One moment."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Köln"})
    assert message.stop_reason == "tool_use"
    with client.messages.stream(**ask("Four.")) as stream:
        assert "".join(stream.text_stream) == "Four."


def test_plain_streams(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(**ask("Four."), stream=True))
    assert events[0].type == "message_start"
    assert events[-1].type == "message_stop"
    (delta,) = [event for event in events if event.type == "message_delta"]
    assert (delta.delta.stop_reason, delta.usage.output_tokens) == ("end_turn", len("Four.") + 1)


def test_a_conversation_with_tools(client: anthropic.Anthropic, parsing_server: RunningServer) -> None:
    body = ask(f"<think>hm</think>One moment.\n{CALL}")
    message = client.messages.create(**body, tools=[WEATHER])
    call = message.content[-1]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny. SAY(It is sunny.)YAS"}
    body["messages"] += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**body, tools=[WEATHER]).content[0]
    assert answer.type == "text"
    assert answer.text == "It is sunny."
    prompt = parsing_server.engine.tokenizer.decode(list(parsing_server.engine.requests[-1].prompt_token_ids))
    assert f'One moment.[get_weather {{"city": "Köln"}}][tool {call.id}]<tool>sunny.' in prompt


def test_count_tokens(client: anthropic.Anthropic) -> None:
    body = ask("hi")
    usage = client.messages.create(**body).usage
    del body["max_tokens"]
    assert client.messages.count_tokens(**body).input_tokens == usage.input_tokens


def test_errors(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="not served") as info:
        client.messages.create(**{**ask("hi"), "model": "claude-sonnet"})
    assert info.value.type == "not_found_error"
    assert info.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(**ask("hi"), stop_sequences=[""])
    broken: Any = {**ask("hi"), "messages": [{"role": "user", "content": "BREAK("}]}
    with pytest.raises(anthropic.APIStatusError, match="cannot be turned into text"):
        list(client.messages.create(**broken, stream=True))


def test_the_embedded_model(demo: anthropic.Anthropic) -> None:
    body: Any = {"model": "tidewheel-demo", "max_tokens": 100, "extra_body": {"temperature": 0}}
    who: Any = [{"role": "user", "content": "Who are you?"}]
    with demo.messages.stream(**body, messages=who) as stream:
        streamed = stream.get_final_text()
    assert "tidewheel" in streamed.lower()
    (whole,) = demo.messages.create(**body, messages=who).content
    assert whole.type == "text"
    assert whole.text == streamed
    asked: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    message = demo.messages.create(**body, messages=asked, tools=[WEATHER])
    (call,) = message.content
    assert call.type == "tool_use"
    assert (call.name, call.input, message.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"weather": "sunny"}'}
    asked += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    (answer,) = demo.messages.create(**body, messages=asked, tools=[WEATHER]).content
    assert answer.type == "text"


class Mill(pydantic.BaseModel):
    wheel: Literal["oak", "iron"]
    grinds: bool


def test_the_embedded_model_is_parsed(demo: anthropic.Anthropic) -> None:
    import anthropic

    pytest.importorskip("llguidance")
    ask: Any = {
        "model": "tidewheel-demo",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "Invent a mill."}],
        "extra_body": {"temperature": 0},
    }
    message = demo.messages.parse(**ask, output_format=Mill)
    assert isinstance(message.parsed_output, Mill)
    thanks: Any = [{"role": "assistant", "content": message.content}, {"role": "user", "content": "Thanks."}]
    assert demo.messages.create(**{**ask, "messages": ask["messages"] + thanks}).content
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
        demo.messages.create(**ask, output_config={"format": {"type": "json_schema", "schema": {"type": "mill"}}})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_the_embedded_model_must_call(demo: anthropic.Anthropic, choice: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    message = demo.messages.create(
        model="tidewheel-demo",
        max_tokens=500,
        messages=[{"role": "user", "content": "Hi."}],
        tools=[{**WEATHER, "input_schema": schema}],
        extra_body={"temperature": 0},
        tool_choice={**choice, "disable_parallel_tool_use": True},
    )
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.input["city"] in ("Paris", "Oslo")
    assert message.stop_reason == "tool_use"
