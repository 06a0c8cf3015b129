"""LangChain's ChatOllama. Its ChatOpenAI is tested in test_langchain.py."""

from __future__ import annotations

from typing import Any

from common import HELLO, INVENT, MODEL, QUESTION, Wheel, get_weather, main
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama


def scenario(url: str) -> dict[str, Any]:
    chat = ChatOllama(model=MODEL, base_url=url, temperature=0, validate_model_on_init=True)
    with_tools = chat.bind_tools([tool(get_weather)])
    asked = with_tools.invoke(QUESTION)
    (call,) = asked.tool_calls
    result = ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"], name=call["name"])
    return {
        "called": call["args"],
        "answer": with_tools.invoke([HumanMessage(QUESTION), asked, result]).content,
        "whole": chat.invoke(HELLO).content,
        "streamed": "".join(str(chunk.content) for chunk in chat.stream(HELLO)),
        "structured": chat.with_structured_output(Wheel, method="json_schema").invoke(INVENT),
    }


main(scenario)
