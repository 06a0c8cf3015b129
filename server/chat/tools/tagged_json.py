"""Formats that differ from Hermes' only in their tags, or in where an object has the function's name."""

from __future__ import annotations

from ..text_scanner import Steps
from .call_format import CallFormat
from .parser import Outcome, TaggedJsonParser, ToolParser


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


class MiniMaxM1Parser(JambaParser):
    """MiniMax M1: an object on each line."""

    call_formats = (CallFormat(separator="\n", opening="<tool_calls>\n", closing="\n</tool_calls>", key="arguments"),)


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


class GigaChat3Parser(TaggedJsonParser):
    """GigaChat 3. A call may be a message of its own. Nothing closes a call."""

    opening = (
        "<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n"
    )  # fmt: skip
    closing = ""
    markers = (opening[0], "<|message_sep|>", "<|role_sep|>")
    call_formats = tuple(CallFormat(tag, key="arguments", at_most=1) for tag in opening)


class GraniteFunctionParser(TaggedJsonParser):
    """Granite 20B for function calling. Nothing closes a call."""

    opening, closing = ("<function_call>",), ""
    markers = opening
    call_formats = (CallFormat(f"{opening[0]} ", separator="\n", key="arguments"),)


class ApertusParser(ToolParser):
    """Apertus: a list of objects that have the arguments under the function's name."""

    markers = ("<|tools_prefix|>", "<|tools_suffix|>")
    call_formats = (CallFormat('{"NAME": ', "}", ", ", "<|tools_prefix|>[", "]<|tools_suffix|>"),)

    def _parse(self) -> Steps[None]:
        opening, closing = self.markers
        while (yield from self._text_until(opening)) is not None:
            outcome = (yield from self._named_calls()) if (yield from self._skip("[")) else Outcome.NO_CALL
            if outcome is Outcome.NO_CALL:
                self._reject()
            elif outcome is Outcome.BROKEN:
                yield from self._raw_arguments(closing)
                self._settle()
            else:
                yield from self._close(closing)

    def _named_calls(self) -> Steps[Outcome]:
        outcome = Outcome.NO_CALL
        while (yield from self._skip("{")):
            name = self._named = yield from self._json_string()
            if not name or not (yield from self._skip(":")) or (yield from self._peek()) != "{":
                break
            self._start_call(name)
            if not (yield from self._json_arguments()):
                return Outcome.BROKEN
            outcome = Outcome.CALL
            yield from self._skip_surplus("}")
            yield from self._skip(",")
        if outcome is Outcome.CALL:
            self._at = 0
            yield from self._skip_surplus("]}")
        return outcome


class InklingParser(TaggedJsonParser):
    """Inkling. A call is a message of its own, whose header may have the function's name too."""

    opening, closing = ("<|content_invoke_tool_json|>",), "<|end_message|>"
    argument_keys = ("args", "arguments")
    markers = (*opening, closing)
    call_formats = (
        CallFormat(f"NAME{opening[0]}", closing, "<|message_model|>", key="args"),
        CallFormat(f"NAME{opening[0]}", closing, "<|message_model|>", "<|message_model|>", key="args"),
    )


def _cohere_list(opening: str, separator: str, closing: str) -> CallFormat:
    return CallFormat(
        "", "", separator, opening, closing, key="parameters", name_key="tool_name", id_key="tool_call_id"
    )


class CohereParser(TaggedJsonParser):
    """Command R7B, A and A+: a list of objects with `tool_call_id`, `tool_name` and `parameters`."""

    opening, closing = ("<|START_ACTION|>",), "<|END_ACTION|>"
    markers = (*opening, closing)
    name_keys = ("tool_name", "name")
    call_formats = (
        _cohere_list("<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
        _cohere_list("<|START_ACTION|>[", ", ", "]<|END_ACTION|>"),
    )
