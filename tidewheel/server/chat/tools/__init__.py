"""Tool calls: one file for each format in which models write them."""

from __future__ import annotations

from collections.abc import Mapping

from tidewheel.server.chat.tools.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from tidewheel.server.chat.tools.granite import GraniteParser
from tidewheel.server.chat.tools.hermes import HermesParser
from tidewheel.server.chat.tools.llama3 import Llama3JsonParser
from tidewheel.server.chat.tools.mistral import MistralParser
from tidewheel.server.chat.tools.parser import ToolParser
from tidewheel.server.chat.tools.phi4 import Phi4MiniJsonParser
from tidewheel.server.chat.tools.pythonic import Llama4PythonicParser, PythonicParser
from tidewheel.server.chat.tools.qwen3_coder import Qwen3CoderParser

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
    "phi4_mini_json": Phi4MiniJsonParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
}
"""The parsers that `--tool-call-parser` names, by vLLM's names."""
