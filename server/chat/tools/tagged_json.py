"""Formats that differ from Hermes' only in their tags, and in the name that a function's name has."""

from __future__ import annotations

from .call_format import CallFormat
from .parser import TaggedJsonParser


class NemotronJsonParser(TaggedJsonParser):
    """Nemotron Nano 2."""

    opening, closing = ("<TOOLCALL>",), "</TOOLCALL>"
    markers = (*opening, closing)
    call_formats = (CallFormat(separator=", ", opening="<TOOLCALL>[", closing="]</TOOLCALL>", key="arguments"),)


class JambaParser(TaggedJsonParser):
    """Jamba and Hunyuan A13B."""

    opening, closing = ("<tool_calls>",), "</tool_calls>"
    markers = (*opening, closing)
    call_formats = (CallFormat(separator=", ", opening="<tool_calls>[", closing="]</tool_calls>", key="arguments"),)


class LongcatParser(TaggedJsonParser):
    """LongCat."""

    opening, closing = ("<longcat_tool_call>",), "</longcat_tool_call>"
    markers = (*opening, closing)
    call_formats = (CallFormat("<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n", key="arguments"),)


class InternLmParser(TaggedJsonParser):
    """InternLM 2.5 and 3."""

    opening, closing = ("<|action_start|><|plugin|>",), "<|action_end|>"
    markers = (*opening, "<|action_start|>", "<|plugin|>", closing)
    call_formats = (CallFormat(f"{opening[0]}\n", closing, key="parameters", at_most=1),)


class CohereParser(TaggedJsonParser):
    """Command R7B, A and A+: a list of objects with `tool_call_id`, `tool_name` and `parameters`."""

    opening, closing = ("<|START_ACTION|>",), "<|END_ACTION|>"
    markers = (*opening, closing)
    name_keys = ("tool_name", "name")
