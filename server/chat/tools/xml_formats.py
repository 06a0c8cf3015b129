# ruff: noqa: RUF001 - DeepSeek's and Step's tags are spelt with full-width bars
"""The formats that XmlParser reads:

`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5, Seed-OSS;
`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>`: MiniMax;
`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM, Hunyuan 3, Solar Open 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from tidewheel.engine.constraints.structural_tag import QwenXmlParameter

from ..tag_suffix import tag_suffix
from ..text_scanner import Steps
from .call_format import CallFormat
from .notation import Notation
from .parser import ToolParser
from .xml import Shape, XmlParser

if TYPE_CHECKING:
    from tidewheel.engine.text.tokenizer import Tokenizer

_BARE_NAME = re.compile(r"[\w.:/-]+")


class Qwen3CoderParser(XmlParser):
    """Qwen3-Coder, Qwen3.5 and Nemotron 3."""

    shape = Shape(
        "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", on_lines=True
    )
    markers = ("<tool_call>", "</tool_call>")
    call_formats = (
        CallFormat("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", "\n", content=QwenXmlParameter),
    )


class Step3p5Parser(Qwen3CoderParser):
    """Step 3.5, which has nothing between calls."""

    call_formats = (Qwen3CoderParser.call_formats[0]._replace(separator=""),)


class SeedOssParser(XmlParser):
    """Seed-OSS."""

    shape = Qwen3CoderParser.shape._replace(opening="<seed:tool_call>", closing="</seed:tool_call>", on_lines=False)
    markers = ("<seed:tool_call>", "</seed:tool_call>")
    call_formats = (
        CallFormat(
            "<seed:tool_call>\n<function=NAME>\n",
            "</function>\n</seed:tool_call>",
            "\n",
            content=QwenXmlParameter,
        ),
    )


class MiniMaxM2Parser(XmlParser):
    """MiniMax M2."""

    shape = Shape(
        "<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "</invoke>", "<parameter name=", "</parameter>"
    )
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")
    call_formats = (
        CallFormat(
            '<invoke name="NAME">\n',
            "</invoke>\n",
            opening="<minimax:tool_call>\n",
            closing="</minimax:tool_call>",
            content=Notation('<parameter name="KEY">', "</parameter>\n").format,
        ),
    )


class MiniCpm5Parser(XmlParser):
    """MiniCPM 5, which has texts with marks in them in CDATA."""

    shape = Shape("", "", "<function name=", "</function>", "<param name=", "</param>")
    markers = ("<function name=",)
    cdata, cdata_end = "<![CDATA[", "]]>"
    call_formats = (
        CallFormat(
            '<function name="NAME">',
            "</function>",
            "\n",
            content=Notation('<param name="KEY">', "</param>").format,
        ),
    )

    def _value(self, function: str, give: Callable[[str], object]) -> Steps[bool]:
        if not (yield from self._literal(self.cdata)):
            return (yield from super()._value(function, give))
        self._settle()
        while (end := self._text.find(self.cdata_end)) < 0:
            certain = len(self._text) - self._begun_tag((self.cdata_end,))
            give(self._text[:certain])
            self._settle(certain)
            if not (yield from self._more()):
                give(self._text)
                self._settle(len(self._text))
                return False
        give(self._text[:end])
        self._settle(end + len(self.cdata_end))
        yield from self._close(self.shape.parameter_end)
        return True


class MuseGlimmerParser(XmlParser):
    """Muse Glimmer. A call is a message of its own to the function."""

    shape = Shape(
        "<atem:function_calls>",
        "</atem:function_calls>",
        "<atem:invoke name=",
        "</atem:invoke>",
        "<atem:parameter name=",
        "</atem:parameter>",
    )
    markers = (shape.opening, shape.closing)
    call_formats = tuple(
        CallFormat(
            ' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n',
            "</atem:invoke>\n</atem:function_calls>",
            "<|eom|><|start|>assistant",
            opening,
            content=Notation('<atem:parameter name="KEY">', "</atem:parameter>\n").format,
        )
        for opening in ("", "<|start|>assistant")
    )


class Step3Parser(XmlParser):
    """Step 3."""

    shape = Shape(
        "<｜tool_call_begin｜>",
        "<｜tool_call_end｜>",
        "<steptml:invoke name=",
        "</steptml:invoke>",
        "<steptml:parameter name=",
        "</steptml:parameter>",
        section="<｜tool_calls_begin｜>",
        section_end="<｜tool_calls_end｜>",
        lead="function<｜tool_sep｜>",
    )
    markers = (shape.section, shape.section_end, shape.opening, shape.closing, "<｜tool_sep｜>")
    call_formats = (
        CallFormat(
            f'{shape.opening}{shape.lead}<steptml:invoke name="NAME">\n',
            f"</steptml:invoke>{shape.closing}\n",
            opening=f"{shape.section}\n",
            closing=shape.section_end,
            content=Notation('<steptml:parameter name="KEY">', "</steptml:parameter>\n").format,
        ),
    )


def _dsml(calls: str, space: str = "") -> tuple[Shape, tuple[CallFormat, ...]]:
    begin, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    shape = Shape(
        f"{begin}{calls}>",
        f"{end}{calls}>",
        f"{begin}invoke name=",
        f"{end}invoke>",
        f"{begin}parameter name=",
        f"{end}parameter>",
    )
    parameters = Notation(
        f'{begin}parameter name="KEY" string="false">',
        f"{end}parameter>\n",
        text_before=f'{begin}parameter name="KEY" string="true">',
    )
    call = CallFormat(
        f'{begin}invoke name="NAME">\n',
        f"{end}invoke>\n",
        opening=f"{shape.opening}\n",
        closing=shape.closing,
        content=parameters.format,
    )
    return shape, (call,)


class DeepSeekV32Parser(XmlParser):
    """DeepSeek V3.2. The attribute `string` says whether a value is text or JSON."""

    shape, call_formats = _dsml("function_calls")
    markers = ("｜DSML｜", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜invoke name=")


class DeepSeekV4Parser(XmlParser):
    """DeepSeek V4."""

    shape, call_formats = _dsml("tool_calls")
    markers = DeepSeekV32Parser.markers


class DeepSeekV41Parser(XmlParser):
    """DeepSeek V4.1."""

    shape, call_formats = _dsml("calls", " ")
    markers = ("｜DSML｜", shape.opening, shape.function)


class Glm45Parser(XmlParser):
    """GLM 4.5 to 5, which write line breaks between the tags, or none."""

    shape = Shape("<tool_call>", "</tool_call>", "", "</tool_call>", "<arg_key>", "</arg_value>")
    key_end: ClassVar[str] = "</arg_key>"
    value_start: ClassVar[str] = "<arg_value>"
    name_end: ClassVar[str] = ""
    markers: ClassVar[tuple[str, ...]] = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    call_formats = tuple(
        CallFormat(
            f"<tool_call>NAME{line}",
            "</tool_call>",
            line,
            content=Notation(f"<arg_key>KEY</arg_key>{line}<arg_value>", f"</arg_value>{line}").format,
        )
        for line in ("\n", "")
    )

    def _function_name(self) -> Steps[str | None]:
        start = self._at
        while (character := (yield from self._peek())) and _BARE_NAME.fullmatch(character):
            self._at += 1
        name = self._named = self._text[start : self._at]
        yield from self._spaces()
        if self.name_end and (yield from self._literal(self.name_end)):
            yield from self._spaces()
        before = self._at
        is_call = (yield from self._literal(self.shape.parameter)) or (yield from self._literal(self.shape.closing))
        self._at = before
        return name if name and is_call else None

    def _key(self) -> Steps[tuple[str, str | None] | None]:
        key = yield from self._name_text()
        if not key or not (yield from self._literal(self.key_end)):
            return None
        if self.value_start:
            yield from self._spaces()
            yield from self._literal(self.value_start)  # models leave it out at times
        return key, None


class SolarOpen2Parser(Glm45Parser):
    """Solar Open 2."""

    shape = Shape(
        "<|tool_call:start|>", "<|tool_call:end|>", "", "<|tool_call:end|>", "<|tool_arg:start|>", "<|tool_arg:end|>"
    )
    key_end, value_start = "<|tool_arg:value|>", ""
    markers = (shape.opening, shape.closing, shape.parameter, key_end, shape.parameter_end)
    call_formats = (
        CallFormat(
            f"{shape.opening}NAME\n",
            shape.closing,
            "\n",
            content=Notation(f"{shape.parameter}KEY{key_end}", f"{shape.parameter_end}\n").format,
        ),
    )


class HyV3Parser(Glm45Parser):
    """Hunyuan 3. Some of its vocabularies have a suffix in every tag, such as `<tool_calls:6124c78e>`."""

    shape = Shape(
        "<tool_call>", "</tool_call>", "", "</tool_call>", "<arg_key>", "</arg_value>",
        section="<tool_calls>", section_end="</tool_calls>",
    )  # fmt: skip
    name_end = "<tool_sep>"
    line: ClassVar[str] = "\n"
    markers = (shape.section, shape.section_end, name_end, *Glm45Parser.markers)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.call_formats = cls._formats()

    @classmethod
    def _formats(cls) -> tuple[CallFormat, ...]:
        shape, line = cls.shape, cls.line
        arguments = Notation(
            f"{shape.parameter}KEY{cls.key_end}{line}{cls.value_start}", f"{shape.parameter_end}{line}"
        )
        return (
            CallFormat(
                f"{shape.opening}NAME{cls.name_end}{line}",
                f"{shape.closing}{line}",
                opening=f"{shape.section}{line}",
                closing=shape.section_end,
                content=arguments.format,
            ),
        )

    @classmethod
    def in_vocabulary(cls, tokenizer: Tokenizer) -> type[ToolParser]:
        """See ToolParser."""
        suffix = tag_suffix("tool_calls", tokenizer)
        if not suffix:
            return cls

        def tagged(text: str) -> str:
            return re.sub(r"(</?\w+)>", rf"\1{suffix}>", text)

        shape = Shape(*(tagged(part) if isinstance(part, str) else part for part in cls.shape))  # type: ignore[arg-type]
        tags = {name: tagged(getattr(cls, name)) for name in ("key_end", "value_start", "name_end")}
        markers = tuple(map(tagged, cls.markers))
        return type(f"Suffixed{cls.__name__}", (cls,), {"shape": shape, "markers": markers, **tags})


HyV3Parser.call_formats = HyV3Parser._formats()


class HyV4Parser(HyV3Parser):
    """Hunyuan 4."""

    name_end, line = "", ""
    markers = (HyV3Parser.shape.section, HyV3Parser.shape.section_end, *Glm45Parser.markers)
