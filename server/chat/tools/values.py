"""Values that models write in other notations, as JSON text."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from .json_scanner import is_json

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<string>'''(?:[^\\]|\\.)*?'''|\"""(?:[^\\]|\\.)*?\"""|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
      | (?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?))
      | (?P<name>True|False|None|true|false|null)\b
      | (?P<comma>,(?=\s*[\]}]))
      | (?P<mark>[][{},:])
    )\s*""",
    re.DOTALL | re.VERBOSE,
)
_LINE_BREAK = re.compile(r"(\\.)|[\r\n]", re.DOTALL)
_NAMES = {"True": "true", "False": "false", "None": "null"}


def to_json(value: Any) -> str:
    """`value` as JSON text that UTF-8 can encode. Raises ValueError for what JSON has not: NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # A lone surrogate, which an escape in a literal can make, has no UTF-8.
    return text if is_encodable(text) else json.dumps(value, allow_nan=False)


def is_encodable(text: str) -> bool:
    """Whether UTF-8 has this text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def python_literal_to_json(source: str) -> str | None:
    """A Python literal (strings, numbers, True, False, None, lists and dicts of them) as JSON; None if it is none.

    JSON's own true, false and null are taken too, and line breaks in any quotes. Works token by token: Python's parser
    is only given single tokens, so that no nesting can exhaust its stack.
    """
    parts: list[str] = []
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            return None
        at = match.end()
        text = match[match.lastgroup or 0].strip()
        follows_value = bool(parts) and parts[-1] not in ("[", "{", ", ", ": ")
        if match.lastgroup == "mark":
            parts.append({",": ", ", ":": ": "}.get(text, text))
        elif match.lastgroup == "comma":  # JSON has none before a bracket
            if not follows_value:
                return None
        elif follows_value:
            return None
        elif text.startswith('"') and is_json(text):
            parts.append(text)
        elif match.lastgroup == "name":
            parts.append(_NAMES.get(text, text))
        else:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of escapes that Python does not have
                    parts.append(to_json(ast.literal_eval(_LINE_BREAK.sub(_escaped_break, text))))
            except (ValueError, SyntaxError):
                return None
    result = "".join(parts)
    return result if is_json(result) else None


def typed_json(value: str, types: set[str]) -> str:
    """A value's text as JSON of one of `types`, as far as it can be read so, else as a string."""
    stripped = value.strip()
    if not stripped and types in ({"object"}, {"array"}):
        return "{}" if types == {"object"} else "[]"
    literal = stripped if is_json(stripped) else python_literal_to_json(stripped)
    if "string" in types or not types:
        # Any text is a string; what else it may be has to be unmistakable.
        takes_null = "null" in types and literal == "null"
        return "null" if takes_null else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if literal is None else literal


def escaped(text: str) -> str:
    """A text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _escaped_break(found: re.Match[str]) -> str:
    return found[1] or ("\\n" if found[0] == "\n" else "\\r")
