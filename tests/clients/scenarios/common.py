"""What the scenarios have in common. Each is a program that gets the server's URL and prints its results as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "tidewheel-demo"
QUESTION = "What is the weather in Paris?"
INVENT = "Invent a wheel."
HELLO = "Who are you?"
QUERY = "what turns the wheel"
DOCUMENTS = ["corn", "the tide turns a wheel", "rain and rain"]


class Wheel(BaseModel):
    """A wheel of a mill."""

    model_config = ConfigDict(extra="forbid")

    spokes: int = Field(ge=3, le=9)
    material: Literal["oak", "iron"]


def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return f"It is sunny in {city}."


WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main(scenario: Callable[[str], dict[str, Any]]) -> None:
    """Runs a scenario against the server of a URL."""
    results = scenario(sys.argv[1])
    shown = {name: one.model_dump() if isinstance(one, BaseModel) else one for name, one in results.items()}
    print(json.dumps(shown))
