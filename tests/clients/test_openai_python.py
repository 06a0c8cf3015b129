"""The openai SDK for Python beyond the calls of everyday: raw responses, asyncio, time limits, helpers on schemas."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import encoder_zoo as zoo
import httpx
import numpy as np
import pytest
from clients.conftest import say, until_idle
from server.conftest import RunningServer, ServerProcess, StartServer

from tidewheel.server.http.limits import AdmissionLimits

if TYPE_CHECKING:
    import openai

CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(scripted: RunningServer) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="secret", max_retries=0) as sdk:
        yield sdk


def connect(server: RunningServer, **options: Any) -> openai.AsyncOpenAI:
    import openai

    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, **options)


def ask(text: str, **fields: Any) -> Any:
    return {"model": "scripted", "messages": say(text), **fields}


def test_raw_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**ask("hi"), extra_headers={"x-request-id": "mine"})
    assert raw.status_code == 200
    assert raw.headers["x-request-id"] == raw.request_id == "mine"
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content == "hi"
    with client.chat.completions.with_streaming_response.create(**ask("hi", stream=True)) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_errors_carry_their_request(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**ask("hi", temperature=-1), extra_headers={"x-request-id": "mine"})
    assert (bad.value.request_id, bad.value.param, bad.value.type) == ("mine", "temperature", "invalid_request_error")


def test_asyncio(scripted: RunningServer) -> None:
    import openai
    from clients.shapes import Weather

    async def run() -> None:
        async with connect(scripted) as sdk:
            assert [model.id async for model in sdk.models.list()] == ["scripted", "embed"]
            parsed = await sdk.chat.completions.parse(**ask(CALL), tools=[openai.pydantic_function_tool(Weather)])
            assert parsed.choices[0].message.tool_calls
            assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Köln", days=2)
            async with sdk.chat.completions.stream(**ask("one two")) as stream:
                deltas = [event.delta async for event in stream if event.type == "content.delta"]
                assert (await stream.get_final_completion()).choices[0].message.content == "".join(deltas) == "one two"
            answers = await asyncio.gather(*(sdk.chat.completions.create(**ask(f"answer {i}")) for i in range(16)))
            assert [answer.choices[0].message.content for answer in answers] == [f"answer {i}" for i in range(16)]
            vectors = await sdk.embeddings.create(model="embed", input=["the tide"])
            np.testing.assert_allclose(
                [vectors.data[0].embedding], zoo.reference("bert", ["the tide"]), rtol=1e-4, atol=2e-5
            )

    asyncio.run(run())


def test_tasks_that_are_cancelled_free_the_engine(slow: RunningServer) -> None:
    body: Any = {"model": "scripted", "messages": [{"role": "user", "content": "LOOP("}]}

    async def run() -> None:
        async with connect(slow) as sdk:
            streams = [await sdk.chat.completions.create(**body, stream=True) for _ in range(3)]
            for stream in streams:
                await anext(stream)
            await asyncio.gather(*(stream.close() for stream in streams))
            waiting = [asyncio.create_task(sdk.chat.completions.create(**body)) for _ in range(3)]
            await asyncio.wait(waiting, timeout=0.2)  # they never end by themselves
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(run())
    until_idle(slow)


# The client waits for half a second before it tries again.
def test_time_limits_of_the_client(slow: RunningServer) -> None:
    import openai

    body: Any = {"model": "scripted", "prompt": "LOOP("}
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="secret", max_retries=1, timeout=0.2) as sdk:
        with pytest.raises(openai.APITimeoutError):
            sdk.completions.create(**body, max_tokens=5000)
        until_idle(slow)
        # Between two pieces of a stream, and not for the whole of it.
        patient = sdk.with_options(timeout=httpx.Timeout(120, read=60))
        assert patient.completions.create(**body, max_tokens=20).choices[0].text == "x" * 20


# The server says to come again in a second.
def test_a_busy_server_is_asked_again(start_server: StartServer) -> None:
    import openai

    busy = start_server(engine={"step_s": 0.01, "num_blocks": 64}, admission=AdmissionLimits(max_queue=0))
    statuses: list[int] = []
    streams: list[openai.Stream[Any]] = []

    def on_response(response: httpx.Response) -> None:
        statuses.append(response.status_code)
        if response.status_code == 429:
            for stream in streams:
                stream.close()

    hooks: Any = {"response": [on_response]}
    with openai.OpenAI(
        base_url=f"{busy.url}/v1", api_key="none", max_retries=8, http_client=httpx.Client(event_hooks=hooks)
    ) as sdk:
        body: Any = {"model": "scripted", "max_tokens": 900}
        # As many as fit if their answers are as long as answers usually are.
        streams += [sdk.completions.create(**body, prompt=f"{i} LOOP(", stream=True) for i in range(3)]
        answer = sdk.completions.create(**body, prompt="SAY(hi)YAS")
    assert answer.choices[0].text == "hi"
    assert statuses[:4] == [200, 200, 200, 429]
    assert statuses[-1] == 200


def test_completions_streamed_with_all_that_they_carry(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="scripted", prompt="SAY(one two)YAS", stream=True, logprobs=2, n=2, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    texts, finishes = ["", ""], [[], []]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        finishes[choice.index].append(choice.finish_reason)
        if choice.text:
            assert choice.logprobs
            assert choice.logprobs.tokens
    assert texts == ["one two"] * 2
    assert all(reasons[-1] == "stop" and set(reasons[:-1]) <= {None} for reasons in finishes)
    assert last.usage is not None
    assert last.usage.completion_tokens == 2 * (len("one two") + 1)


def test_parse_and_the_streaming_helper_on_one_schema(demo_server: ServerProcess) -> None:
    """With references and a union, streamed with the events of its parts."""
    import openai
    from clients.shapes import Mill

    pytest.importorskip("llguidance")  # not there on every machine
    body: Any = {
        "model": "tidewheel-demo",
        "messages": [{"role": "user", "content": "Invent a mill."}],
        "response_format": Mill,
        "temperature": 0.7,
        "seed": 1,
    }
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0) as sdk:
        mill = sdk.chat.completions.parse(**body).choices[0].message.parsed
        with sdk.chat.completions.stream(**body) as stream:
            events = list(stream)
            assert stream.get_final_completion().choices[0].message.parsed == mill
    assert isinstance(mill, Mill)
    deltas = [event for event in events if event.type == "content.delta"]
    assert len(deltas) > 1
    assert {event.type for event in events} == {"chunk", "content.delta", "content.done"}


def test_parse_of_an_answer_that_is_cut_off(demo_server: ServerProcess) -> None:
    import openai
    from clients.shapes import Mill

    pytest.importorskip("llguidance")  # not there on every machine
    with (
        openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0) as sdk,
        pytest.raises(openai.LengthFinishReasonError),
    ):
        sdk.chat.completions.parse(
            model="tidewheel-demo", messages=[{"role": "user", "content": "Hi"}], response_format=Mill, max_tokens=3
        )


def test_a_demanded_call_on_the_embedded_model(demo_server: ServerProcess) -> None:
    import openai
    from clients.shapes import Weather

    pytest.importorskip("llguidance")  # not there on every machine
    body: Any = {
        "model": "tidewheel-demo",
        "messages": [{"role": "user", "content": "Weather in Paris?"}],
        "tools": [openai.pydantic_function_tool(Weather)],
        "tool_choice": {"type": "function", "function": {"name": "Weather"}},
        "temperature": 0,
    }
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0) as sdk:
        with sdk.chat.completions.stream(**body) as stream:
            (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
        whole = sdk.chat.completions.parse(**body)
    assert isinstance(call.function.parsed_arguments, Weather)
    assert whole.choices[0].message.tool_calls
    assert whole.choices[0].message.tool_calls[0].function.parsed_arguments == call.function.parsed_arguments
