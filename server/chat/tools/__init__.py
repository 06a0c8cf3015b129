"""Tool calls: one file for each format in which models write them."""

from __future__ import annotations

from collections.abc import Mapping

from .deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from .granite import GraniteParser
from .harmony import HarmonyToolParser
from .hermes import HermesParser
from .llama3 import Llama3JsonParser
from .mistral import MistralParser
from .parser import ToolParser
from .phi4 import Phi4MiniJsonParser
from .pythonic import Llama4PythonicParser, PythonicParser
from .qwen3_coder import Qwen3CoderParser

TOOL_CALL_PARSERS: Mapping[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "granite": GraniteParser,
    "granite4": HermesParser,
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "llama4_pythonic": Llama4PythonicParser,
    "mistral": MistralParser,
    "openai": HarmonyToolParser,
    "phi4_mini_json": Phi4MiniJsonParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
}
"""The parsers that `--tool-call-parser` names, by vLLM's names."""
