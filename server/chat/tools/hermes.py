"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3, Granite 4 and many others."""

from __future__ import annotations

from .call_format import CallFormat
from .parser import TaggedJsonParser


class HermesParser(TaggedJsonParser):
    """See the module."""

    opening = ("<tool_call>",)
    closing = "</tool_call>"
    markers = ("<tool_call>", "</tool_call>")
    call_formats = (CallFormat("<tool_call>\n", "\n</tool_call>", "\n", key="arguments"),)
