"""Tools of `/v1/responses`, and choices among them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from .chat import ToolName
from .decode import unsupported
from .response_items import UNSET, Unset

NO_SERVER_TOOLS = "this server runs no tools: the model is not told of it"


class _ClientTool(msgspec.Struct, kw_only=True):
    allowed_callers: list[str] | Unset | None = UNSET

    def check_supported(self, path: str) -> None:
        """Raises ApiError (400) for what this server has no way to honour; `path` is where the tool is."""
        if self.allowed_callers and "direct" not in self.allowed_callers:
            raise unsupported(f"{path}.allowed_callers", ' unless "direct" is among them')


class _OwnTool(_ClientTool, kw_only=True):
    name: ToolName
    description: str | None = None
    defer_loading: bool | Unset | None = UNSET
    is_async: bool | Unset | None = msgspec.field(name="async", default=UNSET)

    def check_supported(self, path: str) -> None:
        if self.is_async:
            raise unsupported(f"{path}.async", " unless it is false")
        super().check_supported(path)


class FunctionTool(_OwnTool, tag="function", kw_only=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextInput(msgspec.Struct, tag="text"):
    """Any text."""


class GrammarInput(msgspec.Struct, tag="grammar"):
    """Text that matches a grammar."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(_OwnTool, tag="custom", kw_only=True):
    """A tool of the client's that takes text."""

    format: TextInput | GrammarInput | None = None


class LocalShellTool(_ClientTool, tag="local_shell", kw_only=True):
    """The client runs programs."""

    name: ClassVar[str] = "local_shell"


class Skill(msgspec.Struct):
    """A folder of the client's that says how something is done."""

    name: str
    description: str
    path: str


class LocalEnvironment(msgspec.Struct, tag="local"):
    """The client's own machine."""

    skills: list[Skill] | None = None


class ContainerAuto(msgspec.Struct, tag="container_auto"):
    """A container that other servers make."""


class ContainerReference(msgspec.Struct, tag="container_reference"):
    """A container that other servers have made."""


class ShellTool(_ClientTool, tag="shell", kw_only=True):
    """The client runs commands in a shell."""

    name: ClassVar[str] = "shell"
    environment: LocalEnvironment | ContainerAuto | ContainerReference | None = None

    def check_supported(self, path: str) -> None:
        if isinstance(self.environment, ContainerAuto | ContainerReference):
            raise unsupported(f"{path}.environment", ' unless its type is "local": this server runs no commands')
        super().check_supported(path)


class ApplyPatchTool(_ClientTool, tag="apply_patch", kw_only=True):
    """The client changes files."""

    name: ClassVar[str] = "apply_patch"


class NamespaceTool(msgspec.Struct, tag="namespace", kw_only=True):
    """Tools under a name of their own."""

    name: ToolName
    description: str | None = None
    tools: list[FunctionTool | CustomTool]


class ServerTool(msgspec.Struct):
    """A tool that other servers run themselves."""


class CodeInterpreter(ServerTool, tag="code_interpreter"):
    """Runs code."""


class FileSearch(ServerTool, tag="file_search"):
    """Looks into stored files."""


class ImageGeneration(ServerTool, tag="image_generation"):
    """Makes images."""


class Mcp(ServerTool, tag="mcp"):
    """Has the tools of an MCP server."""


class ProgrammaticToolCalling(ServerTool, tag="programmatic_tool_calling"):
    """Runs code that calls tools."""


class ToolSearch(ServerTool, tag="tool_search"):
    """Finds tools that were not loaded. Here all are."""


class WebSearch(ServerTool, tag="web_search"):
    """Searches the web."""


class WebSearch20250826(ServerTool, tag="web_search_2025_08_26"):
    """Searches the web."""


class WebSearchPreview(ServerTool, tag="web_search_preview"):
    """Searches the web."""


class WebSearchPreview20250311(ServerTool, tag="web_search_preview_2025_03_11"):
    """Searches the web."""


AnyServerTool: TypeAlias = (
    CodeInterpreter
    | FileSearch
    | ImageGeneration
    | Mcp
    | ProgrammaticToolCalling
    | ToolSearch
    | WebSearch
    | WebSearch20250826
    | WebSearchPreview
    | WebSearchPreview20250311
)
BuiltInTool: TypeAlias = LocalShellTool | ShellTool | ApplyPatchTool
ClientTool: TypeAlias = FunctionTool | CustomTool | BuiltInTool
ResponseTool: TypeAlias = ClientTool | NamespaceTool | AnyServerTool


class NamedFunction(msgspec.Struct, tag="function", forbid_unknown_fields=True, omit_defaults=True):
    """A function on offer, by its name."""

    name: str
    namespace: str | None = None


class NamedCustomTool(msgspec.Struct, tag="custom", forbid_unknown_fields=True, omit_defaults=True):
    """A custom tool on offer, by its name."""

    name: str
    namespace: str | None = None


class AllowedTools(msgspec.Struct, tag="allowed_tools", forbid_unknown_fields=True):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedFunction | NamedCustomTool | BuiltInTool | AnyServerTool]


ToolChoice: TypeAlias = (
    Literal["none", "auto", "required"] | NamedFunction | NamedCustomTool | BuiltInTool | AllowedTools | AnyServerTool
)


def kind_of(tool: msgspec.Struct) -> str:
    """A tool's `type`."""
    return str(tool.__struct_config__.tag)
