"""The names of the parsers of tool calls and reasoning, which are vLLM's.

They are apart from the parsers because the options name them. The options are read before a model is looked for, and
the parsers bring a good part of the server with them.
"""

from __future__ import annotations

TOOL_CALL_PARSER_NAMES = (
    "deepseek_v3",
    "deepseek_v31",
    "granite",
    "granite4",
    "hermes",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "mistral",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
)
TOOL_CALL_PARSER_ALIASES = {"qwen3_json": "hermes"}
"""Other names that vLLM has for some of them."""
HARMONY_REASONING = ("GptOss", "gpt_oss", "openai_gptoss")
"""Names of the one parser of reasoning in OpenAI's harmony format."""
REASONING_PARSER_NAMES = (
    "GptOss",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "gpt_oss",
    "mistral",
    "olmo3",
    "openai_gptoss",
    "qwen3",
    "seed_oss",
)
