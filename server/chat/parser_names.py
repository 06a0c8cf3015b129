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
    "internlm",
    "jamba",
    "kimi_k2",
    "lfm2",
    "ling3",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "longcat",
    "mimo",
    "minicpm5",
    "minimax_m2",
    "mistral",
    "nemotron_json",
    "olmo3",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
    "step3p5",
)
TOOL_CALL_PARSER_ALIASES = {"qwen3_json": "hermes"}
"""Other names that vLLM has for some of them."""
HARMONY_REASONING = ("GptOss", "gpt_oss", "openai_gptoss")
"""Names of the one parser of reasoning in OpenAI's harmony format."""
REASONING_PARSER_NAMES = (
    "GptOss",
    "cohere_command3",
    "cohere_command4",
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "gemma4",
    "glm45",
    "glm47",
    "gpt_oss",
    "holo2",
    "kimi_k2",
    "mimo",
    "minimax_m2",
    "minimax_m3",
    "mistral",
    "nemotron_v3",
    "olmo3",
    "openai_gptoss",
    "qwen3",
    "seed_oss",
    "step3",
    "step3p5",
)
