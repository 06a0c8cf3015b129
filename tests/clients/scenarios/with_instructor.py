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

    called = ask(instructor.Mode.TOOLS, GetWeather, QUESTION)
    structured = ask(instructor.Mode.JSON_SCHEMA, Wheel, INVENT)
    *_, partial = ask(instructor.Mode.TOOLS, instructor.Partial[Wheel], INVENT, stream=True)
    plain = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": HELLO}], temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in plain)
    return {
        "called": called.model_dump(),
        "answer": get_weather(called.city),
        "whole": text,
        "streamed": text,
        "structured": structured,
        "partial": Wheel.model_validate(partial.model_dump()).model_dump(),
    }


main(scenario)
