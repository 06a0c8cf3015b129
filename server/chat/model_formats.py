# ruff: noqa: RUF001 - DeepSeek's tags are spelt with full-width bars
"""How a model writes tool calls and reasoning, guessed from its chat template.

A template writes past calls, or tells the model how to write new ones, with the tags of the model's format. A wrong
guess does little harm: calls are looked for only in answers to requests that offer tools, reasoning only where an
answer begins with its tag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from .harmony import CHANNEL, MESSAGE, START
from .template_switches import TOOLS, variables_in


class ModelFormats(NamedTuple):
    """The names of the parsers that read a model's answers; None where there is none.

    `no_calls_because` says why no calls are read. With `tools_as_text` the template does not show tools, so messages
    describe them.
    """

    tool_calls: str | None
    reasoning: str | None
    no_calls_because: str = ""
    tools_as_text: bool = False


class _Sign(NamedTuple):
    """The sign of a format: the template has all of some texts, and none of some others."""

    parser: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()


_CALL_SIGNS = (
    _Sign("openai", (START, CHANNEL, MESSAGE)),
    _Sign("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    _Sign("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    _Sign("step3", ("<｜tool_call_begin｜>",)),
    _Sign("step3", ("<steptml:",)),
    _Sign("deepseek_v41", ("｜DSML｜", " calls>")),
    _Sign("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    _Sign("deepseek_v32", ("｜DSML｜", "function_calls>")),
    _Sign("mistral", ("[TOOL_CALLS]",)),
    _Sign("gemma4", ("<|tool_call>call:",)),
    _Sign("functiongemma", ("<start_function_call>",)),
    _Sign("kimi_k2", ("<|tool_call_begin|>",)),
    _Sign("kimi_k3", ("<|open|>", "<|sep|>", "<|close|>")),
    _Sign("minimax_m3", ("]<]minimax[>[",)),
    _Sign("minimax_m2", ("<minimax:tool_call>",)),
    _Sign("muse_glimmer", ("<atem:invoke",)),
    _Sign("seed_oss", ("<seed:tool_call>",)),
    _Sign("solar_open2", ("<|tool_call:start|>",)),
    _Sign("solar_open", ("<|tool_call:begin|>",)),
    _Sign("inkling", ("<|content_invoke_tool_json|>",)),
    _Sign("lfm2", ("<|tool_call_start|>",)),
    _Sign("lfm2", ("<|tool_list_start|>",)),
    _Sign("lfm2", ("List of tools: [", "keep_past_thinking")),
    _Sign("cohere_command3", ("<|START_ACTION|>",)),
    _Sign("nemotron_json", ("<TOOLCALL>",)),
    _Sign("internlm", ("<|action_start|>", "<|plugin|>")),
    _Sign("longcat", ("<longcat_tool_call>",)),
    _Sign("apertus", ("<|tools_prefix|>",)),
    _Sign("gigachat3", ("<|function_call|>",)),
    _Sign("gigachat3", ("<|role_sep|>", "function call")),
    _Sign("granite-20b-fc", ("<function_call>",)),
    _Sign("minicpm5", ("<function name=", "<param name=")),
    _Sign("olmo3", ("<function_calls>",), ("<invoke",)),
    _Sign("hy_v3", ("<tool_sep", "<arg_key")),  # both may have a suffix
    _Sign("hy_v4", ("<tool_calls", "<arg_key")),
    _Sign("glm45", ("<tool_call>", "<arg_key>")),
    _Sign("minimax", ("<tool_calls></tool_calls>", "tool-name")),
    _Sign("jamba", ("<tool_calls>[{",)),
    _Sign("jamba", ("<tool_calls>",), ("<tool_call>", "<arg_key>")),
    _Sign("xlam", ("tool_call_name", "JSON array")),
    _Sign("phi4_mini_json", ("functools[",)),
    _Sign("phi4_mini_json", ("<|tool_call|>", "<|/tool_call|>")),
    _Sign("granite", ("<|tool_call|>",)),
    _Sign("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    # Other models write something else than JSON between these tags.
    _Sign("hermes", ("<tool_call>", "arguments"), ("<function=", "<arg_key>", "<tool_calls>")),
)
_REASONING_SIGNS = (
    _Sign("openai_gptoss", (START, CHANNEL, MESSAGE)),
    _Sign("mistral", ("[THINK]",)),
    _Sign("seed_oss", ("<seed:think>",)),
    _Sign("gemma4", ("<channel|>",)),
    _Sign("cohere_command3", ("<|START_THINKING|>",)),
    _Sign("cohere_command3", ("<|START_RESPONSE|>",)),
    _Sign("minimax_m3", ("<mm:think>",)),
    _Sign("kimi_k3", ("<|open|>", "<|sep|>", "<|close|>")),
    _Sign("inkling", ("<|content_thinking|>",)),
    _Sign("solar_open2", ("<|think:start|>",)),
    _Sign("solar_open", ("<|think|>", "<|begin|>")),
    _Sign("muse_glimmer", ("<|start|>", "to=self<|message|>")),
    _Sign("apertus", ("<|inner_prefix|>",)),
    _Sign("longcat", ("<longcat_think>",)),
    _Sign("apriel", ("[BEGIN FINAL RESPONSE]",)),
    _Sign("granite", ("Here is my thought process:",)),
    _Sign("hy_v3", ("<tool_sep", "<arg_key")),
    _Sign("hy_v4", ("<tool_calls", "<arg_key")),
    _Sign("minimax_m2", ("<minimax:tool_call>", "</think>")),
    _Sign("hunyuan_a13b", ("</think>", "<answer>")),
    _Sign("ernie45", ("</think>", "<response>")),
    _Sign("deepseek_r1", ("<｜Assistant｜>", "</think>"), ("<think>",)),  # the model begins to reason by itself
    _Sign("qwen3", ("</think>",)),
)
_FORM_OF_TEXTS = "hermes"  # see tools_as_text.py
# Formats without tags. A call's arguments after the key "parameters", which a tool's schema has too:
_JSON_CALL = re.compile(r'"parameters\\?":\W{0,40}[\w.\[\]\'"]{0,60}\barguments\b')
# ... and the list of calls in the text that tells a model how to write them.
_PYTHONIC_CALL = re.compile(r"\[\w+\(\w+ ?=")


def model_formats(
    template: str | Mapping[str, str] | None, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> ModelFormats:
    """The formats of a model with this chat template, by `--tool-call-parser` and `--reasoning-parser`.

    Both options are a parser's name, `auto` or `none`. With `auto`, messages tell of tools if the template does not.
    """
    by_name = {"default": template} if isinstance(template, str) else template or {}
    for_tools = by_name.get("tool_use") or by_name.get("default", "")
    calls, reasoning = tool_call_parser, reasoning_parser
    because, as_text = "", False
    if calls == "none":
        because = "this server was started with --tool-call-parser none"
    elif calls == "auto" and not for_tools:
        calls, because = "none", "this model has no chat template"
    elif calls == "auto" and not _uses_tools(for_tools):
        calls, as_text = _FORM_OF_TEXTS, True
    elif calls == "auto":
        calls = _calls_in(for_tools)
        because = "" if calls != "none" else "this model's chat template does not show how the model writes calls"
    if reasoning == "auto":
        reasoning = _parser_of(_REASONING_SIGNS, by_name.get("default", for_tools))
    return ModelFormats(
        None if calls == "none" else calls, None if reasoning == "none" else reasoning, because, as_text
    )


def _calls_in(template: str) -> str:
    parser = _parser_of(_CALL_SIGNS, template)
    if parser == "none" and _JSON_CALL.search(template):
        return "llama3_json"
    if parser == "none" and _PYTHONIC_CALL.search(template):
        return "llama4_pythonic" if "<|header_start|>" in template else "pythonic"
    return parser


def _parser_of(signs: tuple[_Sign, ...], template: str) -> str:
    for sign in signs:
        if all(text in template for text in sign.has) and not any(text in template for text in sign.lacks):
            return sign.parser
    return "none"


def _uses_tools(template: str) -> bool:
    """Whether a template has a variable for tools, not only an attribute of that name."""
    return not variables_in(template).isdisjoint(TOOLS)
