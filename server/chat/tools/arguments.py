"""A call's arguments for protocols that have them as an object."""

from __future__ import annotations

import msgspec

from .json_scanner import is_json

INVALID_JSON = "INVALID_JSON"
"""The key of text that is no JSON object, where a protocol or a template wants an object."""


def arguments_object(text: str) -> msgspec.Raw | dict[str, str]:
    """The object of a call's arguments. `text` is its JSON.

    If the model did not write a JSON object, its text is kept under a key of its own.
    """
    if not text:
        return {}
    return msgspec.Raw(text.encode()) if text.startswith("{") and is_json(text) else {INVALID_JSON: text}
