"""How long the parts of a generation took."""

from __future__ import annotations

import time
from typing import NamedTuple

from .generations import Generation


class Durations(NamedTuple):
    """Seconds since the request arrived, and those for the prompt and for the tokens after the first."""

    total_s: float
    prompt_s: float
    decode_s: float


def durations(generation: Generation) -> Durations:
    """The durations of a generation of one choice, so far."""
    timer, (choice, *_) = generation.timer, generation.choices
    times = choice.times
    prompt_s = 0.0 if times is None else times.first_token - times.scheduled
    return Durations(time.perf_counter() - timer.started, prompt_s, timer.decode_time(choice) or 0.0)
