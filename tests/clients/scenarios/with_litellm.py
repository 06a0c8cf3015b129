"""LiteLLM."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or its import waits for a download

import litellm
from common import HELLO, INVENT, MODEL, QUESTION, WEATHER_TOOL, Wheel, get_weather, main


def scenario(url: str) -> dict[str, Any]:
    def complete(content: str | list[Any], **options: Any) -> Any:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return litellm.completion(
            model=f"hosted_vllm/{MODEL}",
            api_base=f"{url}/v1",
            api_key="none",
            messages=messages,
            temperature=0,
            **options,
        )

    asked = complete(QUESTION, tools=[WEATHER_TOOL]).choices[0].message
    (call,) = asked.tool_calls
    arguments = json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": get_weather(**arguments)}
    answer = complete([{"role": "user", "content": QUESTION}, asked, result], tools=[WEATHER_TOOL])
    structured = complete(INVENT, response_format=Wheel).choices[0].message.content
    through_ollama = litellm.completion(
        model=f"ollama_chat/{MODEL}", api_base=url, messages=[{"role": "user", "content": HELLO}], max_tokens=60
    )
    return {
        "called": arguments,
        "answer": answer.choices[0].message.content,
        "whole": complete(HELLO).choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in complete(HELLO, stream=True)),
        "structured": Wheel.model_validate_json(structured),
        "ollama": through_ollama.choices[0].message.content,
    }


main(scenario)
