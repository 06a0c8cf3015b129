"""The chat format: the Jinja template that ships with the model, and the same rendering cut into trained spans."""

from __future__ import annotations

import json
from typing import Any

from .corpus import Conversation

CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
{%- if content is string -%}
{{- content -}}
{%- elif content is iterable and content is not mapping -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}{{- '<image>' -}}{%- elif part.text is string -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set has_system = messages and messages[0].role in ['system', 'developer'] -%}
{%- if tools -%}
{{- '<|im_start|>system\n' -}}
{%- if has_system -%}{{- text(messages[0].content) -}}{{- '\n' -}}{%- endif -%}
{{- '<tools>\n' -}}
{%- for tool in tools -%}
{%- set signature = tool.function if tool.function is mapping else tool -%}
{{- '{"name": ' -}}{{- signature.name | tojson -}}
{{- ', "description": ' -}}{{- (signature.description or '') | tojson -}}
{{- ', "parameters": {' -}}
{%- if signature.parameters is mapping and signature.parameters.properties is mapping -%}
{%- for key in signature.parameters.properties -%}
{%- set schema = signature.parameters.properties[key] -%}
{%- if not loop.first -%}{{- ', ' -}}{%- endif -%}
{{- key | tojson -}}{{- ': ' -}}{{- (schema.type if schema.type is string else 'string') | tojson -}}
{%- endfor -%}
{%- endif -%}
{{- '}}\n' -}}
{%- endfor -%}
{{- '</tools>\nIf a tool fits, reply with <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n' -}}
{%- elif has_system -%}
{{- '<|im_start|>system\n' -}}{{- text(messages[0].content) -}}{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role in ['system', 'developer'] and not loop.first) -%}
{{- '<|im_start|>' -}}{{- 'user' if message.role == 'user' else 'system' -}}{{- '\n' -}}
{{- text(message.content) -}}{{- '<|im_end|>\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}{{- text(message.content) -}}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- set call = call.function if call.function is mapping else call -%}
{%- if not loop.first or text(message.content) -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n{"name": ' -}}{{- call.name | tojson -}}{{- ', "arguments": ' -}}
{%- if call.arguments is string -%}{{- call.arguments -}}{%- else -%}{{- call.arguments | tojson -}}{%- endif -%}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' -}}{{- text(message.content) -}}{{- '\n</tool_response><|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".strip()


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tool_line(tool: dict[str, Any]) -> str:
    function = tool["function"]
    types = {key: schema["type"] for key, schema in function["parameters"]["properties"].items()}
    return _dump({"name": function["name"], "description": function["description"], "parameters": types})


def spans(conversation: Conversation) -> list[tuple[str, bool]]:
    """Render a conversation as the template does, as (text, is it trained on) pieces."""
    messages = list(conversation.messages)
    pieces: list[tuple[str, bool]] = []
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
    if conversation.tools:
        lines = [system] if system is not None else []
        lines += ["<tools>", *map(_tool_line, conversation.tools), "</tools>"]
        lines.append('If a tool fits, reply with <tool_call>{"name": ..., "arguments": {...}}</tool_call>')
        pieces.append(("<|im_start|>system\n" + "\n".join(lines) + "<|im_end|>\n", False))
    elif system is not None:
        pieces.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for message in messages:
        if message["role"] == "assistant":
            answer = message["content"]
            for call in message.get("tool_calls", ()):
                answer += f"<tool_call>\n{_dump(call['function'])}\n</tool_call>"
            pieces += [("<|im_start|>assistant\n", False), (answer + "<|im_end|>", True), ("\n", False)]
        elif message["role"] == "tool":
            text = f"<|im_start|>user\n<tool_response>\n{message['content']}\n</tool_response><|im_end|>\n"
            pieces.append((text, False))
        else:
            pieces.append((f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n", False))
    return pieces
