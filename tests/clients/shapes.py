"""The shapes that clients are asked for, as pydantic models. Tests import this late, because pydantic takes a while."""

from __future__ import annotations

from typing import Literal

import pydantic


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str = pydantic.Field(max_length=12)
    days: int = pydantic.Field(ge=1, le=9)


class Wheel(pydantic.BaseModel):
    """A wheel of a mill."""

    material: Literal["oak", "iron"]
    spokes: int = pydantic.Field(ge=3, le=9)


class Mill(pydantic.BaseModel):
    """A mill with a wheel or two."""

    name: str = pydantic.Field(max_length=12)
    first: Wheel
    second: Wheel | None
