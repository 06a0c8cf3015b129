"""Tool calls: one file for each format in which models write them."""

from __future__ import annotations

from collections.abc import Mapping

from .deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from .gemma import FunctionGemmaParser, Gemma4Parser
from .granite import GraniteParser
from .harmony import HarmonyToolParser
from .hermes import HermesParser
from .kimi import KimiK2Parser, SolarOpenParser
from .kimi_k3 import KimiK3Parser
from .llama3 import Llama3JsonParser
from .minimax_m3 import MiniMaxM3Parser
from .mistral import MistralParser
from .parser import ToolParser
from .phi4 import Phi4MiniJsonParser
from .pythonic import Lfm2Parser, Llama4PythonicParser, Olmo3Parser, PythonicParser
from .tagged_json import (
    ApertusParser,
    CohereParser,
    GigaChat3Parser,
    GraniteFunctionParser,
    InklingParser,
    InternLmParser,
    JambaParser,
    LongcatParser,
    MiniMaxM1Parser,
    NemotronJsonParser,
)
from .xlam import XlamParser
from .xml_formats import (
    DeepSeekV4Parser,
    DeepSeekV32Parser,
    DeepSeekV41Parser,
    Glm45Parser,
    HyV3Parser,
    HyV4Parser,
    MiniCpm5Parser,
    MiniMaxM2Parser,
    MuseGlimmerParser,
    Qwen3CoderParser,
    SeedOssParser,
    SolarOpen2Parser,
    Step3p5Parser,
    Step3Parser,
)

TOOL_CALL_PARSERS: Mapping[str, type[ToolParser]] = {
    "apertus": ApertusParser,
    "cohere_command3": CohereParser,
    "cohere_command4": CohereParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "deepseek_v32": DeepSeekV32Parser,
    "deepseek_v4": DeepSeekV4Parser,
    "deepseek_v41": DeepSeekV41Parser,
    "ernie45": HermesParser,
    "functiongemma": FunctionGemmaParser,
    "gemma4": Gemma4Parser,
    "gigachat3": GigaChat3Parser,
    "glm45": Glm45Parser,
    "glm47": Glm45Parser,
    "granite": GraniteParser,
    "granite-20b-fc": GraniteFunctionParser,
    "granite4": HermesParser,
    "hermes": HermesParser,
    "hunyuan_a13b": JambaParser,
    "hy_v3": HyV3Parser,
    "hy_v4": HyV4Parser,
    "inkling": InklingParser,
    "internlm": InternLmParser,
    "jamba": JambaParser,
    "kimi_k2": KimiK2Parser,
    "kimi_k3": KimiK3Parser,
    "lfm2": Lfm2Parser,
    "ling3": Glm45Parser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "llama4_pythonic": Llama4PythonicParser,
    "longcat": LongcatParser,
    "mimo": Qwen3CoderParser,
    "minicpm5": MiniCpm5Parser,
    "minimax": MiniMaxM1Parser,
    "minimax_m2": MiniMaxM2Parser,
    "minimax_m3": MiniMaxM3Parser,
    "mistral": MistralParser,
    "muse_glimmer": MuseGlimmerParser,
    "nemotron_json": NemotronJsonParser,
    "olmo3": Olmo3Parser,
    "openai": HarmonyToolParser,
    "phi4_mini_json": Phi4MiniJsonParser,
    "poolside_v1": Glm45Parser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
    "seed_oss": SeedOssParser,
    "solar_open": SolarOpenParser,
    "solar_open2": SolarOpen2Parser,
    "step3": Step3Parser,
    "step3p5": Step3p5Parser,
    "xlam": XlamParser,
}
"""The parsers that `--tool-call-parser` names, by vLLM's names."""
