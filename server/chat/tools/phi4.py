"""`functools[{"name": ..., "arguments": {...}}, ...]`: Phi-4-mini; its own template asks for `<|tool_call|>[...]`."""

from __future__ import annotations

from .call_format import CallFormat
from .parser import TaggedJsonParser


class Phi4MiniJsonParser(TaggedJsonParser):
    """See the module."""

    opening = ("functools", "<|tool_call|>")
    closing = "<|/tool_call|>"
    markers = ("<|tool_call|>", "<|/tool_call|>")
    call_formats = (
        CallFormat(separator=", ", opening="functools[", closing="]", key="arguments"),
        CallFormat(separator=", ", opening="<|tool_call|>[", closing="]<|/tool_call|>", key="arguments"),
    )
