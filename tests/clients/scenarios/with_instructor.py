"""instructor, with tools, JSON schemas and partial streams."""

from __future__ import annotations

from typing import Any

import instructor
from common import HELLO, INVENT, MODEL, QUESTION, Wheel, get_weather, main
from openai import OpenAI
from pydantic import BaseModel


class GetWeather(BaseModel):
    """Get the weather of a city"""

    city: str


def scenario(url: str) -> dict[str, Any]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(mode: instructor.Mode, model: type[BaseModel], question: str, **options: Any) -> Any:
        made = instructor.from_openai(client, mode=mode)
        messages = [{"role": "user", "content": question}]
        return made.chat.completions.create(
            model=MODEL,
            messages=messages,
            response_model=model,
            temperature=0,
            max_tokens=200,
            max_retries=0,
            **options,
        )

    def said(*messages: Any, **options: Any) -> Any:
        return client.chat.completions.create(model=MODEL, messages=[*messages], temperature=0, **options)

    made = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    question: Any = {"role": "user", "content": QUESTION}
    called, raw = made.chat.completions.create_with_completion(
        model=MODEL, messages=[question], response_model=GetWeather, temperature=0, max_tokens=200, max_retries=0
    )
    (call,) = raw.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": get_weather(called.city)}
    answer = said(question, raw.choices[0].message.model_dump(exclude_none=True), result)
    hello = {"role": "user", "content": HELLO}
    structured = ask(instructor.Mode.JSON_SCHEMA, Wheel, INVENT)
    *_, partial = ask(instructor.Mode.TOOLS, instructor.Partial[Wheel], INVENT, stream=True)
    return {
        "called": called.model_dump(),
        "answer": answer.choices[0].message.content,
        "whole": said(hello).choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in said(hello, stream=True)),
        "structured": structured,
        "partial": Wheel.model_validate(partial.model_dump()).model_dump(),
    }


main(scenario)
