"""Reading a Hugging Face config field by field, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelError
from ..files.wording import shown
from .spec import Activation

# Hugging Face's names, by what they compute: gelu_new, gelu_fast and gelu_pytorch_tanh are one formula.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu2",
}
MAX_LAYERS = 10_000
MAX_INTEGER = 2**31 - 1  # what devices count with
_LEAST, _MOST = 2.0**-126, 2.0**127  # numbers that float32 holds with all its digits


class ConfigReader:
    """Typed access to a config. A field that is absent or null takes the default; without one it is required.

    All methods raise ModelError, naming the field, for a value of the wrong kind.
    """

    def __init__(self, values: Mapping[str, Any], owner: str = "config.json") -> None:
        self._values = values
        self._owner = owner

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def raw(self, name: str) -> Any:
        """The value as it is, None if absent."""
        return self._values.get(name)

    def with_fields(self, **fields: object) -> ConfigReader:
        """The same config with these values, whatever it has now. None takes a field away."""
        return ConfigReader({**self._values, **fields}, self._owner)

    def with_defaults(self, **fields: object) -> ConfigReader:
        """The same config with these values where it has none."""
        return self.with_fields(**{name: value for name, value in fields.items() if self.raw(name) is None})

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer of 31 bits."""
        value = self._required(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_INTEGER:
            raise self.error(name, f"a positive integer of at most {MAX_INTEGER}")
        return value

    def num_layers(self, name: str) -> int:
        """How many layers there are. It is bounded, because each layer gets a description of its own."""
        value = self.integer(name)
        if value > MAX_LAYERS:
            raise self.error(name, f"at most {MAX_LAYERS}")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """A positive integer, None where the field is null, `default` where it is absent."""
        if name not in self:
            return default
        return None if self.raw(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number that is positive and finite in float32 too, which devices use."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _LEAST <= value <= _MOST:
            raise self.error(name, "a positive number that float32 can hold")
        return float(value)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A positive number, None where the field is null, `default` where it is absent."""
        if name not in self:
            return default
        return None if self.raw(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def activation(self, name: str, default: str) -> Activation:
        """An activation function under one of Hugging Face's names."""
        value = self._required(name, default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.error(name, "one of " + ", ".join(sorted(_ACTIVATIONS)))
        return _ACTIVATIONS[value]

    def refuse(self, name: str, *harmless: object) -> None:
        """Raise if the field is set to anything but null or a value that changes nothing."""
        value = self.raw(name)
        if value is not None and value not in harmless:
            raise ModelError(f"{self._owner}: {name} = {shown(value)} is not supported")

    def error(self, name: str, rule: str) -> ModelError:
        """The error for a field that breaks `rule`."""
        if self.raw(name) is None:
            return ModelError(f"{self._owner}: {name} is missing; it must be {rule}")
        return ModelError(f"{self._owner}: {name} must be {rule}, got {shown(self.raw(name))}")

    def _required(self, name: str, default: object) -> Any:
        value = self.raw(name)
        return default if value is None else value
