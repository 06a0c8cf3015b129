"""pydantic-ai, which runs loops of tools by itself."""

from __future__ import annotations

import asyncio
from typing import Any

from common import HELLO, INVENT, MODEL, QUESTION, Wheel, get_weather, main
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def scenario(url: str) -> dict[str, Any]:
    return asyncio.run(_scenario(url))


async def _scenario(url: str) -> dict[str, Any]:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings: Any = {"temperature": 0, "max_tokens": 200}
    asked: list[str] = []

    def weather(city: str) -> str:
        """Get the weather of a city"""
        asked.append(city)
        return get_weather(city)

    agent = Agent(model, model_settings=settings)
    with_tools = Agent(model, model_settings=settings)
    with_tools.tool_plain(weather, name="get_weather")
    answer = await with_tools.run(QUESTION)
    async with agent.run_stream(HELLO) as stream:
        streamed = "".join([piece async for piece in stream.stream_text(delta=True)])
    return {
        "called": {"city": asked[0]},
        "answer": answer.output,
        "whole": (await agent.run(HELLO)).output,
        "streamed": streamed,
        "structured": (await Agent(model, output_type=NativeOutput(Wheel), model_settings=settings).run(INVENT)).output,
        "by tool": (await Agent(model, output_type=Wheel, model_settings=settings).run(INVENT)).output.model_dump(),
    }


main(scenario)
