"""LangChain's ChatOpenAI, OpenAI and OpenAIEmbeddings over real sockets, on known answers and the embedded model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import encoder_zoo as zoo
import numpy as np
import pytest
from clients.conftest import say, until_idle
from server.conftest import RunningServer, ServerProcess

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
ARGUMENTS = {"city": "Köln", "days": 2}


def weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"SAY(Sunny in {city} for {days} days.)YAS"


@pytest.fixture
def settings(scripted: RunningServer) -> dict[str, Any]:
    return {"base_url": f"{scripted.url}/v1", "api_key": "secret", "model": "scripted", "max_retries": 0}


@pytest.fixture
def chat(settings: dict[str, Any]) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(**settings)


@pytest.fixture
def demo(demo_server: ServerProcess) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    model: Any = "tidewheel-demo"
    return ChatOpenAI(base_url=f"{demo_server.url}/v1", api_key="none", model=model, temperature=0, max_retries=0)


def joined(chunks: list[Any]) -> Any:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


def test_invoke(chat: ChatOpenAI) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage

    answer = chat.invoke([SystemMessage("Be brief."), HumanMessage("SAY(grüß dich)YAS")])
    assert answer.content == "grüß dich"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == "scripted"
    assert answer.usage_metadata
    assert answer.usage_metadata["output_tokens"] == len("grüß dich".encode()) + 1


def test_stream(chat: ChatOpenAI) -> None:
    chunks = list(chat.stream(say("grüß dich"), stream_usage=True))
    whole = joined(chunks)
    assert whole.content == "grüß dich"
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata["output_tokens"] == len("grüß dich".encode()) + 1


def test_chains_stops_and_log_probabilities(chat: ChatOpenAI) -> None:
    from langchain_core.prompts import ChatPromptTemplate

    prompt = ChatPromptTemplate([("system", "Be brief."), ("human", "SAY({text})YAS")])
    answer = (prompt | chat.bind(stop=["three"], logprobs=True, top_logprobs=2)).invoke({"text": "one two three"})
    assert answer.content == "one two "
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_batch(chat: ChatOpenAI) -> None:
    prompts = [f"SAY(answer {i})YAS" for i in range(12)]
    assert [answer.content for answer in chat.batch(prompts)] == [f"answer {i}" for i in range(12)]


def test_async(settings: dict[str, Any]) -> None:
    from langchain_openai import ChatOpenAI

    async def run() -> None:
        chat = ChatOpenAI(**settings)
        assert (await chat.ainvoke("SAY(one)YAS")).content == "one"
        chunks = [chunk async for chunk in chat.astream("SAY(two)YAS")]
        assert joined(chunks).content == "two"
        answers = await chat.abatch([f"SAY({i})YAS" for i in range(8)])
        assert [answer.content for answer in answers] == [str(i) for i in range(8)]

    asyncio.run(run())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"output_version": "v1"}, {"use_responses_api": True}, {"use_previous_response_id": True}],
    ids=["chat", "content blocks", "responses", "responses kept"],
)
def test_a_loop_of_tools(settings: dict[str, Any], streamed: bool, options: dict[str, Any]) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(**settings, **options)
    weather_tool = tool(weather)
    with_tools = chat.bind_tools([weather_tool])
    messages: list[Any] = [HumanMessage(f"SAY(One moment.\n{CALL}\n{CALL})YAS")]
    asked = joined(list(with_tools.stream(messages))) if streamed else with_tools.invoke(messages)
    assert [(call["name"], call["args"]) for call in asked.tool_calls] == [("weather", ARGUMENTS)] * 2
    assert asked.text == "One moment."
    results = [weather_tool.invoke(call) for call in asked.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    answer = with_tools.invoke([*messages, asked, *results])
    assert answer.text == "Sunny in Köln for 2 days."
    again = with_tools.invoke([*messages, asked, *results, answer, HumanMessage("SAY(You are welcome.)YAS")])
    assert again.text == "You are welcome."


def test_the_embedded_model_calls_a_tool(demo: ChatOpenAI) -> None:
    from langchain_core.messages import AIMessage, HumanMessage
    from langchain_core.tools import tool

    @tool
    def get_weather(city: str) -> str:
        """Get the weather of a city"""
        return "sunny"

    with_tools = demo.bind_tools([get_weather])
    asked = with_tools.invoke("What is the weather in Paris?")
    assert [(call["name"], call["args"]) for call in asked.tool_calls] == [("get_weather", {"city": "Paris"})]
    (result,) = (get_weather.invoke(call) for call in asked.tool_calls)
    assert isinstance(with_tools.invoke([HumanMessage("What is the weather in Paris?"), asked, result]), AIMessage)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the SDK, about its own parsed messages
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(demo: ChatOpenAI, method: Any, streamed: bool) -> None:
    from clients.shapes import Wheel

    pytest.importorskip("llguidance")  # not there on every machine
    structured = demo.with_structured_output(Wheel, method=method)
    *_, answer = structured.stream("Invent a wheel.") if streamed else [structured.invoke("Invent a wheel.")]
    assert isinstance(answer, Wheel)


def test_structured_output_by_json_mode(chat: ChatOpenAI) -> None:
    from clients.shapes import Wheel

    pytest.importorskip("llguidance")  # not there on every machine
    structured = chat.with_structured_output(Wheel, method="json_mode")
    assert structured.invoke('SAY({"spokes": 4, "material": "oak"})YAS') == Wheel(spokes=4, material="oak")


def test_completions(settings: dict[str, Any]) -> None:
    from langchain_openai import OpenAI

    completions = OpenAI(**settings)
    assert completions.invoke("SAY(one)YAS") == "one"
    assert completions.batch(["SAY(two)YAS", "SAY(three)YAS"]) == ["two", "three"]
    assert "".join(completions.stream("SAY(four)YAS")) == "four"


def test_embeddings(settings: dict[str, Any]) -> None:
    from langchain_openai import OpenAIEmbeddings

    # Otherwise it would send token ids of another model's vocabulary.
    embeddings = OpenAIEmbeddings(**{**settings, "model": "embed"}, check_embedding_ctx_length=False)
    texts = zoo.texts(5)
    wanted = zoo.reference("bert", texts)
    np.testing.assert_allclose(embeddings.embed_documents(texts), wanted, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(embeddings.embed_query(texts[0]), wanted[0], rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(asyncio.run(embeddings.aembed_documents(texts)), wanted, rtol=1e-4, atol=2e-5)


def test_errors(chat: ChatOpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat.invoke("hi", temperature=-1)
    with pytest.raises(openai.APIError, match="cannot be turned into text"):
        list(chat.stream("BREAK("))


def test_a_stream_that_is_left_frees_the_engine(settings: dict[str, Any], slow: RunningServer) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(**{**settings, "base_url": f"{slow.url}/v1"})
    stream = chat.stream("LOOP(")
    next(stream)
    stream.close()
    until_idle(slow)
