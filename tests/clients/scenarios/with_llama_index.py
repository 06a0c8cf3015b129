"""LlamaIndex, over OpenAI's API and over Ollama's."""

from __future__ import annotations

from typing import Any

from common import HELLO, INVENT, MODEL, QUESTION, Wheel, get_weather, main
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike


def scenario(url: str) -> dict[str, Any]:
    llm = OpenAILike(
        model=MODEL, api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
        should_use_structured_outputs=True, temperature=0, max_tokens=200, max_retries=0,
    )  # fmt: skip
    ollama = Ollama(model=MODEL, base_url=url, temperature=0, request_timeout=60)
    tool = FunctionTool.from_defaults(get_weather)
    asked = llm.chat_with_tools([tool], user_msg=QUESTION)
    (call,) = llm.get_tool_calls_from_response(asked)
    result = ChatMessage(
        role="tool", content=get_weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id}
    )
    answer = llm.chat([ChatMessage(role="user", content=QUESTION), asked.message, result])
    hello = [ChatMessage(role="user", content=HELLO)]
    return {
        "called": call.tool_kwargs,
        "answer": answer.message.content,
        "whole": llm.chat(hello).message.content,
        "streamed": "".join(part.delta or "" for part in llm.stream_chat(hello)),
        "structured": llm.structured_predict(Wheel, PromptTemplate(INVENT)),
        "ollama": ollama.chat(hello).message.content,
        "ollama structured": ollama.structured_predict(Wheel, PromptTemplate(INVENT)).model_dump(),
    }


main(scenario)
