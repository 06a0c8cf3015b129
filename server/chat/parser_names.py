"""The names of the parsers of tool calls and reasoning, which are vLLM's.

They are apart from the parsers because the options name them. The options are read before a model is looked for, and
the parsers bring a good part of the server with them.
"""

from __future__ import annotations

TOOL_CALL_PARSER_NAMES = (
    "apertus",
    "cohere_command3",
    "cohere_command4",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "ernie45",
    "functiongemma",
    "gemma4",
    "gigachat3",
    "glm45",
    "glm47",
    "granite",
    "granite-20b-fc",
    "granite4",
    "hermes",
    "hunyuan_a13b",
    "hy_v3",
    "inkling",
    "internlm",
    "jamba",
    "kimi_k2",
    "kimi_k3",
    "lfm2",
    "ling3",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "longcat",
    "mimo",
    "minicpm5",
    "minimax_m2",
    "minimax_m3",
    "mistral",
    "nemotron_json",
    "olmo3",
    "openai",
    "phi4_mini_json",
    "poolside_v1",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
    "solar_open2",
    "step3",
    "step3p5",
    "xlam",
)
TOOL_CALL_PARSER_ALIASES = {"qwen3_json": "hermes"}
"""Other names that vLLM has for some of them."""
HARMONY_REASONING = ("GptOss", "gpt_oss", "openai_gptoss")
"""Names of the one parser of reasoning in OpenAI's harmony format."""
REASONING_PARSER_NAMES = (
    "GptOss",
    "apertus",
    "apriel",
    "cohere_command3",
    "cohere_command4",
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "deepseek_v41",
    "ernie45",
    "gemma4",
    "glm45",
    "glm47",
    "gpt_oss",
    "granite",
    "holo2",
    "hunyuan_a13b",
    "hy_v3",
    "inkling",
    "kimi_k2",
    "kimi_k3",
    "ling3",
    "longcat",
    "mimo",
    "minimax_m2",
    "minimax_m3",
    "mistral",
    "nemotron_v3",
    "olmo3",
    "openai_gptoss",
    "poolside_v1",
    "qwen3",
    "seed_oss",
    "solar_open2",
    "step3",
    "step3p5",
)
_REFUSED_REASONING_PARSERS = {
    "minimax_m2_append_think": "it leaves the thoughts in the answer; use minimax_m2, which gives them apart, or none"
}


def reasoning_parser_name(text: str) -> str:
    """The name of a parser of reasoning. Raises ValueError for one of vLLM's that there is not, saying what to use."""
    if (reason := _REFUSED_REASONING_PARSERS.get(text)) is not None:
        raise ValueError(f"{text} is not served: {reason}")
    return text
