"""Kimi K3's calls, `<|open|>call tool="NAME" index="1"<|sep|>` ... `<|close|>call<|sep|>`, with an element an argument:

`<|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>`

The type says whether a value is text or JSON. All arguments may be one element `json` instead. All calls lie between
`<|open|>tools<|sep|>` and `<|close|>tools<|sep|>`.
"""

from __future__ import annotations

import re

from ..text_scanner import Steps
from .call_format import CallFormat, numbered
from .notation import Notation
from .xml import Shape, XmlParser

SPECIALS = ("<|open|>", "<|sep|>", "<|close|>")
_JSON, _JSON_END = "<|open|>json", "<|close|>json<|sep|>"
_ATTRIBUTES = re.compile(r'"(?P<name>[^"]+)"(?:\s+index="\d{1,8}")?(?:\s+type="(?P<type>\w+)")?\s*')


class KimiK3Parser(XmlParser):
    """See the module."""

    shape = Shape(
        "",
        "",
        "<|open|>call tool=",
        "<|close|>call<|sep|>",
        "<|open|>argument key=",
        "<|close|>argument<|sep|>",
        section="<|open|>tools<|sep|>",
        section_end="<|close|>tools<|sep|>",
    )
    markers = SPECIALS
    call_formats = (
        CallFormat(
            '<|open|>call tool="NAME" index="',
            shape.function_end,
            "",
            shape.section,
            shape.section_end,
            content=numbered(
                '"<|sep|>',
                Notation(
                    '<|open|>argument key="KEY" type="TYPE"<|sep|>',
                    shape.parameter_end,
                    text_before='<|open|>argument key="KEY" type="string"<|sep|>',
                ).format,
            ),
        ),
    )

    def _key(self) -> Steps[tuple[str, str | None] | None]:
        named = _ATTRIBUTES.fullmatch((yield from self._name_text()))
        if named is None or not (yield from self._literal("<|sep|>")):
            return None
        name = named["name"].replace("&quot;", '"').replace("&amp;", "&")
        return name, None if named["type"] is None else "true" if named["type"] == "string" else "false"

    def _parameters(self, function: str) -> Steps[bool]:
        yield from self._spaces()
        if not (yield from self._literal(_JSON)):
            return (yield from super()._parameters(function))
        if (yield from self._read_until("<|sep|>")) is None or not (yield from self._json_arguments()):
            return False
        yield from self._close(_JSON_END)
        yield from self._close(self.shape.function_end)
        return True
