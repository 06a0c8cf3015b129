"""`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`: Granite 3; 3.1 and later write `<tool_call>` before it."""

from __future__ import annotations

from .call_format import CallFormat
from .parser import TaggedJsonParser


class GraniteParser(TaggedJsonParser):
    """See the module."""

    opening = ("<|tool_call|>", "<tool_call>")
    closing = "</tool_call>"
    markers = opening
    ends = (*opening, closing)
    call_formats = tuple(CallFormat(separator=", ", opening=f"{tag}[", closing="]", key="arguments") for tag in opening)
