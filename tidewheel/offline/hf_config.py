"""A model's config.json as an object, for scripts that read `model_config.hf_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DICTS = ("quantization_config", "compression_config")  # which transformers leaves as they are


class HfConfig:
    """The fields of a config.json as attributes. Configs of parts, such as `text_config`, are such objects too.

    A field that the file does not have raises AttributeError: the defaults of transformers' classes are not known.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        for name, value in fields.items():
            is_part = isinstance(value, Mapping) and name.endswith("_config") and name not in _DICTS
            setattr(self, name, HfConfig(value) if is_part else value)

    def to_dict(self) -> dict[str, Any]:
        """The fields as the file has them."""
        return dict(self._fields)

    def get_text_config(self) -> HfConfig:
        """The config of the part that reads text: `text_config`, or all of it."""
        part = getattr(self, "text_config", None)
        return part if isinstance(part, HfConfig) else self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the model's config.json has no {name}")

    def __repr__(self) -> str:
        return f"HfConfig({dict(self._fields)!r})"
