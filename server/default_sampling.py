"""How tokens are chosen if neither a request nor the model says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .protocol.sampling import GenerationBody

DEFAULT_SAMPLING = ("auto", "openai", "chat")
CHAT_SAMPLING: Mapping[str, float | int] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's. At OpenAI's temperature of 1 with no bound, small models lose the thread within a few sentences."""


class SamplingDefaults(NamedTuple):
    """Defaults of all requests, and more for requests of people's own clients: the page, `tidewheel chat`, Ollama's."""

    of_all: Mapping[str, float | int]
    of_chats: Mapping[str, float | int]

    def described(self) -> str:
        """For the log of the start."""
        if self.of_chats:
            return f"OpenAI's own; for the page, tidewheel chat and Ollama's API {_written(self.of_chats)}"
        named = {name: self.of_all[name] for name in CHAT_SAMPLING if name in self.of_all}
        return _written(named) if named else "OpenAI's own, of temperature 1"


def sampling_defaults_of(suggested: Mapping[str, float | int], default_sampling: str) -> SamplingDefaults:
    """`suggested` is the model's own, which goes first: with any of it, `default_sampling` has no effect."""
    if default_sampling == "openai" or suggested.keys() & CHAT_SAMPLING.keys():
        return SamplingDefaults(suggested, {})
    if default_sampling == "chat":
        return SamplingDefaults({**CHAT_SAMPLING, **suggested}, {})
    return SamplingDefaults(suggested, CHAT_SAMPLING)


def fill_in(body: GenerationBody, sampling: Mapping[str, float | int]) -> None:
    """Sets the fields that a request leaves open."""
    for name, value in sampling.items():
        if getattr(body, name) is None:
            setattr(body, name, value)


def _written(sampling: Mapping[str, float | int]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items())
